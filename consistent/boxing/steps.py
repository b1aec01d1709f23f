"""The moves on one axis of a placement, and the one move between placements, as data.

| from -> to | kind | sends | transpose |
| --- | --- | --- | --- |
| S(i) -> B | all_gather | own piece to all | P -> S(i) reduce_scatter |
| P -> B | all_reduce | twice nearly all of it | P -> B all_reduce |
| B -> S(i) | slice | nothing | S(i) -> P pad |
| B -> P | keep_first | nothing | B -> P keep_first |
| B -> P(max), P(min) | keep | nothing | |
| S(i) -> S(j) | all_to_all | own piece, but for what it keeps | S(j) -> S(i) all_to_all |
| S(i) -> S(i, cut) | all_to_all | what others are to hold of its piece | the reverse |
| one placement to another | exchange | what others need of it | exchange of the duals |

Rows read both ways: the transpose of ``src -> dst`` is ``dual(dst) -> dual(src)``. The extremes,
P(max) and P(min), have no dual; otherwise they move as P does, combined by their own operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..spec import NdSbp, Placement, Sbp, TensorSpec
from .cost import DEVICES, Device

KINDS = (
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all",
    "slice", "keep_first", "keep", "pad",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Move:
    """One axis goes from ``src`` to ``dst``. Prints ``S(0) -all_gather(0)-> B``."""

    axis: int
    src: Sbp
    dst: Sbp
    kind: str
    nbytes: int  # the largest number of bytes that any rank sends
    # The name of the axis, if the placement names its axes.
    label: str = field(default="", compare=False)
    local_nbytes: int = field(default=0, compare=False)  # of the largest result
    device_type: str = field(default="cpu", compare=False)
    codec: str = field(default="", compare=False)  # by which fewer bytes are sent

    @property
    def seconds(self) -> float:
        """An estimate, see cost.py."""
        return self.seconds_on(DEVICES[self.device_type])

    def seconds_on(self, device: Device) -> float:
        """An estimate on a device of other speeds."""
        return device.move_seconds(self.nbytes, self.local_nbytes)

    @property
    def arrow(self) -> str:
        """``-all_gather(0)->``, ``-all_gather(0) by int8->``"""
        by = self.codec and f" by {self.codec}"
        return f"-{self.kind}({self.label or self.axis}){by}->"

    def __str__(self) -> str:
        return f"{self.src} {self.arrow} {self.dst}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rank ``source`` gives rank ``target`` a box of the logical tensor; both may be one rank."""

    source: int
    target: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    addend: int = 0  # where the target sums: which of the addends this is part of

    def sent_bytes(self, itemsize: int) -> int:
        """Bytes on the wire; none where a rank keeps its own."""
        return math.prod(self.sizes) * itemsize if self.source != self.target else 0

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(self.starts, self.sizes))
        return f"{self.source} -> {self.target} [{box}]"


@dataclass(frozen=True, slots=True)
class Exchange:
    """All ranks' transfers from one placement to another, one batch, in the order of messages."""

    src: TensorSpec
    dst: TensorSpec
    transfers: tuple[Transfer, ...]
    nbytes: int  # the largest number of bytes that any rank sends
    total: int  # what all ranks send together
    busiest: int = field(default=0, compare=False)  # the largest number that any sends or receives
    local_nbytes: int = field(default=0, compare=False)  # of the largest result

    kind: ClassVar[str] = "exchange"

    @property
    def seconds(self) -> float:
        """An estimate, see cost.py. Between device types everything passes through the host."""
        source, target = self.src.placement.type, self.dst.placement.type
        return self.seconds_on(DEVICES[source if source == target else "cpu"])

    def seconds_on(self, device: Device) -> float:
        """An estimate on a device of other speeds."""
        return device.move_seconds(self.busiest, self.local_nbytes)

    def sent_by(self, rank: int) -> int:
        """Bytes that ``rank`` sends."""
        itemsize = self.src.dtype.itemsize
        return sum(t.sent_bytes(itemsize) for t in self.transfers if t.source == rank)

    @property
    def arrow(self) -> str:
        """``-exchange(0, 1 to 2, 3)->``"""
        return f"-exchange({_ranks(self.src.placement)} to {_ranks(self.dst.placement)})->"

    def __str__(self) -> str:
        return f"{_state(self.src.sbp)} {self.arrow} {_state(self.dst.sbp)}"


Step = Move | Exchange


def kind_of(src: Sbp, dst: Sbp) -> str:
    """Which move takes an axis from ``src`` to ``dst``."""
    if src.is_split:
        return "all_to_all" if dst.is_split else "all_gather" if dst.is_broadcast else "pad"
    if src.is_partial:
        return "reduce_scatter" if dst.is_split else "all_reduce"
    return "slice" if dst.is_split else "keep" if dst.is_extreme else "keep_first"


def show(src: NdSbp, moves: Sequence[Step]) -> str:
    """A plan as one line: ``(S(0), P) -all_reduce(1)-> (S(0), B) -all_gather(0)-> (B, B)``."""
    state = list(src)
    text = _state(state)
    for move in moves:
        if isinstance(move, Exchange):
            state = list(move.dst.sbp)
        else:
            state[move.axis] = move.dst
        text += f" {move.arrow} {_state(state)}"
    return text


def _state(entries: Sequence[Sbp]) -> str:
    return str(entries[0]) if len(entries) == 1 else f"({', '.join(map(str, entries))})"


def _ranks(placement: Placement) -> str:
    # A grid shows as rows, as in its placement.
    return placement._ranks_text().removeprefix("[").removesuffix("]")
