"""Layout problem: a graph of the layouts that each part of a step may take, with their costs.

A node is an op, an input, a parameter, or a result; its options are the layouts that it may take.
An edge connects the node that makes a value to a node that reads it. If the reader wants another
layout, the value is boxed on the edge, and in backward its gradient is boxed from the dual (the
layout of the gradient) of the reader's layout to the dual of the maker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..cost_model.model import CostModel
from ..graph.global_ops import PARAMETER, Value
from ..rules.signature import Signature
from ..spec import NdSbp, TensorSpec, sbp_text
from .costs import boxing_seconds_on


@dataclass(frozen=True)
class Option:
    """One choice of layouts for a node, with its cost.

    Args:
        ins, outs: layouts of its operands and of its results.
        seconds: seconds of its work in forward and backward; of a parameter, seconds of reducing
            its gradient and of the optimizer.
        nbytes: bytes that a rank holds for it until backward (or what else
            ``Problem.counted_bytes`` limits).
        signatures: its signature on each mesh axis; empty if it is not an op.
    """

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    seconds: float
    nbytes: int
    signatures: tuple[Signature, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return " -> ".join(", ".join(map(sbp_text, side)) for side in (self.ins, self.outs))


@dataclass
class Node:
    """One part of the step (an op, an input or a result), with the layouts that it may take.

    Args:
        name: the name of the op, parameter or input.
        options: the layouts, of which a solution takes one.
        ins, outs: numbers of the values that it reads and makes.
        block_key: a key for nodes of repeated blocks, such as equal layers: nodes with equal keys
            take the same option. None for a node outside of blocks.
        in_place: whether the node writes its first operand in place, or makes a view of it that is
            written later. Boxing would make it write a copy, so it is forbidden.
    """

    name: str
    options: Sequence[Option]
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    block_key: object = None
    in_place: bool = False


@dataclass(frozen=True)
class Edge:
    """Connection from the node that makes a value to a node that reads it.

    The value is boxed on it if the two nodes' options have different layouts for it.

    Args:
        maker, output: index of the node that makes the value, and which of its outputs it is.
        reader, operand: index of the node that reads it, and which of its operands it is.
        spec: shape, dtype and placement of the value.
        tracked: whether its gradient moves in the other direction in backward.
        gathered: whether it is a parameter that is gathered again in backward, instead of keeping
            the gathered copy until then.
    """

    maker: int
    output: int
    reader: int
    operand: int
    spec: TensorSpec
    tracked: bool
    gathered: bool = False


@dataclass
class Problem:
    """Layout problem of a step: nodes with their options, edges, and what they cost.

    A solution is a list with the index of the chosen option of each node.
    """

    costs: CostModel
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    # Value -> (the node that makes it, index of the output).
    makers: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(
        self, node: Node, values: Sequence[Value], tracked: Sequence[bool] | None = None
    ) -> None:
        """Add a node, and for each of its operands an edge from the node that makes the operand.

        The nodes that make its operands must have been added before.

        Args:
            node: the node.
            values: the values of the step.
            tracked: for each operand, whether a gradient flows back to it; by default, to each
                value that is tracked.
        """
        self.nodes.append(node)
        for operand, v in enumerate(node.ins):
            value = values[v]
            is_tracked = value.tracked if tracked is None else tracked[operand]
            edge = Edge(
                *self.makers[v],
                len(self.nodes) - 1,
                operand,
                value.spec,
                is_tracked,
                value.kind == PARAMETER,
            )
            self.edges.append(edge)
        self.makers.update({v: (len(self.nodes) - 1, i) for i, v in enumerate(node.outs)})

    def counted_bytes(self, kept: int, sent: int) -> int:
        """Return how many bytes of an op count towards the memory limit of ``solve``.

        Here, those that it keeps for backward (``kept``). A subclass may count those that the op
        itself sends (``sent``) instead.
        """
        return kept

    def boxing(self, edge: Edge, source_sbp: NdSbp, target_sbp: NdSbp) -> tuple[float, int]:
        """Return (seconds, bytes held until backward) of boxing the value of ``edge``.

        Args:
            edge: the edge.
            source_sbp: the layout in which the value is made.
            target_sbp: the layout in which it is read. Another one than ``source_sbp`` is
                forbidden if the reader writes the value in place: it then costs
                ``forbidden_seconds``.
        """
        if source_sbp != target_sbp and edge.operand == 0 and self.nodes[edge.reader].in_place:
            return self.forbidden_seconds, 0
        return cost_of_boxing(
            self.costs, edge.spec, source_sbp, target_sbp, edge.tracked, edge.gathered
        )

    def source_layouts(self, edge: Edge) -> list[NdSbp]:
        """Return the layout of the value of ``edge`` for each option of the node that makes it."""
        return [option.outs[edge.output] for option in self.nodes[edge.maker].options]

    def target_layouts(self, edge: Edge) -> list[NdSbp]:
        """Return the layout of the value of ``edge`` for each option of the node that reads it."""
        return [option.ins[edge.operand] for option in self.nodes[edge.reader].options]

    @cached_property
    def forbidden_seconds(self) -> float:
        """Seconds that a forbidden boxing costs: more than all work of any solution.

        So a solution has one only if there is no other.
        """
        return 10.0 + 10 * sum(max(o.seconds for o in node.options) for node in self.nodes)

    @cached_property
    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Costs of boxing on each edge, as a pair of arrays: seconds and bytes.

        Each is indexed by (option of the maker, option of the reader).
        """
        boxing_tables = []
        for edge in self.edges:
            pairs = [
                [self.boxing(edge, a, b) for b in self.target_layouts(edge)]
                for a in self.source_layouts(edge)
            ]
            seconds, nbytes = np.moveaxis(np.array(pairs, dtype=float), -1, 0)
            boxing_tables.append((seconds, nbytes))
        return boxing_tables

    def cost(self, solution: Sequence[int]) -> tuple[float, int]:
        """Return (seconds of the step, bytes that a rank holds) of a solution.

        They are the sums over the chosen option of each node, and the boxing on each edge.
        """
        seconds, nbytes = 0.0, 0
        for node, index in zip(self.nodes, solution, strict=True):
            seconds += node.options[index].seconds
            nbytes += node.options[index].nbytes
        for edge in self.edges:
            source_sbp = self.nodes[edge.maker].options[solution[edge.maker]].outs[edge.output]
            target_sbp = self.nodes[edge.reader].options[solution[edge.reader]].ins[edge.operand]
            boxing_cost = self.boxing(edge, source_sbp, target_sbp)
            seconds, nbytes = seconds + boxing_cost[0], nbytes + boxing_cost[1]
        return seconds, nbytes


def cost_of_boxing(
    costs: CostModel,
    spec: TensorSpec,
    source_sbp: NdSbp,
    target_sbp: NdSbp,
    tracked: bool,
    gathered: bool = False,
) -> tuple[float, int]:
    """Return (seconds, bytes held until backward) of boxing a value from one layout to another.

    Args:
        costs: the machine's cost model.
        spec: shape, dtype and placement of the value.
        source_sbp, target_sbp: layouts before and after.
        tracked: add the boxing of its gradient, from the dual of ``target_sbp`` to that of
            ``source_sbp``.
        gathered: if the boxing only gathers, it is done once more in backward, and no copy is held
            until then.
    """
    if source_sbp == target_sbp:
        return 0.0, 0
    source, target = spec.with_sbp(source_sbp), spec.with_sbp(target_sbp)
    seconds = boxing_seconds_on(costs, source, target)
    if not tracked:
        return seconds, 0
    seconds += boxing_seconds_on(costs, target.dual, source.dual)
    if gathered and may_gather(source_sbp, target_sbp):
        return seconds + boxing_seconds_on(costs, source, target), 0
    return seconds, target.largest_nbytes


def may_gather(source_sbp: NdSbp, target_sbp: NdSbp) -> bool:
    """Return whether boxing between two layouts leaves a tensor B on each axis that it changes.

    ``(S(0), S(1)) -> (S(0), B)`` does, ``S(0) -> S(1)`` does not. Only then may a parameter be
    stored as ``source_sbp`` and gathered before each use.
    """
    return all(w is h or w.is_broadcast for h, w in zip(source_sbp, target_sbp, strict=True))
