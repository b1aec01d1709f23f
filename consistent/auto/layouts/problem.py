"""The choices of layouts that a program leaves open, and their costs.

A node is an op, a tensor that the step is given, or a result; its options are its layouts. An edge
connects the node that makes a value to a node that reads it. If the reader wants another layout,
the value is boxed on the edge, and its gradient is boxed in backward from the reader's dual to the
maker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...rules.signature import Signature
from ...spec import NdSbp, TensorSpec
from .figures import Figures


@dataclass(frozen=True)
class Option:
    """One choice of layouts for a node, with its cost.

    It has the layouts of what the node reads and makes; the seconds of its work in forward and
    backward, of reducing its gradients and of the optimizer; the bytes that a rank holds for it;
    and the signature on each axis.
    """

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    seconds: float
    nbytes: int
    axes: tuple[Signature, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        def shown(sbp: NdSbp) -> str:
            return str(sbp[0] if len(sbp) == 1 else sbp)

        return " -> ".join(", ".join(map(shown, side)) for side in (self.ins, self.outs))


@dataclass
class Node:
    """An op, an input or a result of the program, with its options.

    Nodes with equal keys ``alike`` are parts of equal blocks, and take equal options.
    """

    name: str
    options: Sequence[Option]
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    alike: object = None


@dataclass(frozen=True)
class Edge:
    """Use of output ``have`` of node ``maker`` as operand ``want`` of node ``reader``.

    If ``back``, its gradient moves in backward. If ``gathered``, it is a parameter whose gathered
    copy is made again for backward instead of being kept.
    """

    maker: int
    have: int
    reader: int
    want: int
    spec: TensorSpec
    back: bool
    gathered: bool = False


@dataclass
class Problem:
    """Nodes and edges of a choice; a solution is the index of one option for each node."""

    figures: Figures
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def boxing(self, edge: Edge, have: NdSbp, want: NdSbp) -> tuple[float, int]:
        """Return (seconds, bytes held until backward) of one edge."""
        return box(self.figures, edge.spec, have, want, edge.back, edge.gathered)

    def have(self, edge: Edge) -> list[NdSbp]:
        """Return the layout of the value for each option of the edge's maker."""
        return [option.outs[edge.have] for option in self.nodes[edge.maker].options]

    def want(self, edge: Edge) -> list[NdSbp]:
        """Return the wanted layout for each option of the edge's reader."""
        return [option.ins[edge.want] for option in self.nodes[edge.reader].options]

    @cached_property
    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(seconds, bytes) arrays for each edge, indexed by (maker's option, reader's option)."""
        made = []
        for edge in self.edges:
            pairs = [[self.boxing(edge, a, b) for b in self.want(edge)] for a in self.have(edge)]
            seconds, nbytes = np.moveaxis(np.array(pairs, dtype=float), -1, 0)
            made.append((seconds, nbytes))
        return made

    def cost(self, solution: Sequence[int]) -> tuple[float, int]:
        """Return (seconds of the step, bytes that a rank holds) of a solution."""
        seconds, nbytes = 0.0, 0
        for node, index in zip(self.nodes, solution, strict=True):
            seconds += node.options[index].seconds
            nbytes += node.options[index].nbytes
        for edge in self.edges:
            have = self.nodes[edge.maker].options[solution[edge.maker]].outs[edge.have]
            want = self.nodes[edge.reader].options[solution[edge.reader]].ins[edge.want]
            more = self.boxing(edge, have, want)
            seconds, nbytes = seconds + more[0], nbytes + more[1]
        return seconds, nbytes


def box(
    figures: Figures,
    spec: TensorSpec,
    have: NdSbp,
    want: NdSbp,
    back: bool,
    gathered: bool = False,
) -> tuple[float, int]:
    """Return (seconds, bytes held until backward) of boxing a value.

    ``back`` adds the boxing of its gradient. If ``gathered`` and the value becomes B on some axis,
    it is boxed once more in backward, and nothing is held.
    """
    if have == want:
        return 0.0, 0
    source, target = spec.with_sbp(have), spec.with_sbp(want)
    seconds = figures.boxing(source, target)
    if not back:
        return seconds, 0
    seconds += figures.boxing(target.dual, source.dual)
    if gathered and may_gather(have, want):
        return seconds + figures.boxing(source, target), 0
    return seconds, target.largest_nbytes


def may_gather(have: NdSbp, want: NdSbp) -> bool:
    """Return whether a parameter may be gathered from ``have`` to ``want`` before each use."""
    return all(w is h or w.is_broadcast for h, w in zip(have, want, strict=True))
