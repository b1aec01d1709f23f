"""Steps of a boxing plan, as data: moves on one axis of a placement, and the exchange between two.

| from -> to | kind | sends | transpose |
| --- | --- | --- | --- |
| S(i) -> B | all_gather | own shard to all | P -> S(i) reduce_scatter |
| P -> B | all_reduce | 2 (n-1)/n of the tensor, on n ranks | P -> B all_reduce |
| B -> S(i) | slice | nothing | S(i) -> P pad |
| B -> P | keep_first | nothing | B -> P keep_first |
| B -> P(max), P(min) | keep | nothing | |
| S(i) -> S(j) | all_to_all | own shard, except the part it keeps | S(j) -> S(i) all_to_all |
| S(i) -> S(i, cut) | all_to_all | parts of its shard that others will hold | the reverse |
| one placement to another | exchange | the parts that other ranks need | exchange of the duals |

Rows read both ways: the transpose of ``src -> dst`` is ``dual(dst) -> dual(src)``, which moves the
gradient back. The extremes, P(max) and P(min), have no dual; otherwise they move as P does,
combined by their own operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..cost_model.built_in import BUILT_IN
from ..cost_model.model import CostModel, Ranks
from ..spec import NdSbp, Placement, Sbp, TensorSpec

KINDS = (
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all",
    "slice", "keep_first", "keep", "pad",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Move:
    """Change of the SBP of one axis, from ``src`` to ``dst``, by a collective or a local copy.

    Prints as ``S(0) -all_gather(0)-> B``, where 0 is the axis.
    """

    axis: int
    src: Sbp
    dst: Sbp
    kind: str
    nbytes: int  # the largest number of bytes that any rank sends
    # The name of the axis, if the placement names its axes.
    label: str = field(default="", compare=False)
    local_nbytes: int = field(default=0, compare=False)  # bytes of the largest result
    device_type: str = field(default="cpu", compare=False)
    codec: str = field(default="", compare=False)  # name of the codec that compresses the message

    @property
    def seconds(self) -> float:
        """Estimated seconds of the move on a default machine of the device type (``BUILT_IN``)."""
        return BUILT_IN[self.device_type].move_seconds(self.nbytes, self.local_nbytes)

    def seconds_on(self, costs: CostModel, ranks: Ranks = ()) -> float:
        """Return the estimated seconds of the move on the machine that ``costs`` describes.

        ``ranks`` are the ranks along its axis. They say whether messages leave a host; by default
        they do not.
        """
        return costs.move_seconds(self.nbytes, self.local_nbytes, self.message, ranks)

    @property
    def message(self) -> str:
        """Name under which a cost model knows the move's message.

        A reduce-scatter is listed as an all-to-all, because it is implemented as one: each rank is
        sent all addends of its part, and adds them.
        """
        return "all_to_all" if self.kind == "reduce_scatter" else self.kind

    @property
    def arrow(self) -> str:
        """The move as text for printed plans: ``-all_gather(0)->``.

        The number, or name, is that of the axis. A codec is added: ``-all_gather(0) by int8->``.
        """
        codec_text = self.codec and f" by {self.codec}"
        return f"-{self.kind}({self.label or self.axis}){codec_text}->"

    def __str__(self) -> str:
        return f"{self.src} {self.arrow} {self.dst}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of the logical tensor that rank ``source`` sends to rank ``target`` in an exchange.

    The box begins at index ``starts`` and has ``sizes``. Source and target may be the same rank,
    which then copies the box.
    """

    source: int
    target: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    addend: int = 0  # index of the addend this box is part of, if the target sums

    def sent_bytes(self, itemsize: int) -> int:
        """Return the bytes on the wire: those of the box, or 0 if a rank sends it to itself."""
        return math.prod(self.sizes) * itemsize if self.source != self.target else 0

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(self.starts, self.sizes))
        return f"{self.source} -> {self.target} [{box}]"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step in which ranks send boxes directly to each other, such as a change of placement.

    ``transfers`` lists those of all ranks, in the order of messages.
    """

    src: TensorSpec
    dst: TensorSpec
    transfers: tuple[Transfer, ...]
    nbytes: int  # the largest number of bytes that any rank sends
    total: int  # what all ranks send together
    busiest: int = field(default=0, compare=False)  # the most that any rank sends or receives
    local_nbytes: int = field(default=0, compare=False)  # bytes of the largest result

    kind: ClassVar[str] = "exchange"
    message: ClassVar[str] = "exchange"

    @property
    def seconds(self) -> float:
        """Estimated seconds of the exchange on default machines of the device types (``BUILT_IN``).

        Between device types all data passes through the host, so the figures of the CPU count.
        """
        source, target = self.src.placement.type, self.dst.placement.type
        return self.seconds_on(BUILT_IN[source if source == target else "cpu"])

    def seconds_on(self, costs: CostModel, ranks: Ranks = ()) -> float:
        """Return the estimated seconds of the exchange on the machine that ``costs`` describes.

        ``ranks`` are all that take part. They say whether messages leave a host; by default they do
        not.
        """
        return costs.move_seconds(self.busiest, self.local_nbytes, self.message, ranks)

    def sent_by(self, rank: int) -> int:
        """Return the bytes that ``rank`` sends."""
        itemsize = self.src.dtype.itemsize
        return sum(t.sent_bytes(itemsize) for t in self.transfers if t.source == rank)

    @property
    def arrow(self) -> str:
        """The exchange as text, for printed plans: ``-exchange(0, 1 to 2, 3)->`` with ranks."""
        return f"-exchange({_rank_rows(self.src.placement)} to {_rank_rows(self.dst.placement)})->"

    def __str__(self) -> str:
        return f"{_sbps_text(self.src.sbp)} {self.arrow} {_sbps_text(self.dst.sbp)}"


Step = Move | Exchange


def kind_of(src: Sbp, dst: Sbp) -> str:
    """Return the kind of the move from ``src`` to ``dst``: ``"all_gather"`` for S(0) to B."""
    if src.is_split:
        return "all_to_all" if dst.is_split else "all_gather" if dst.is_broadcast else "pad"
    if src.is_partial:
        return "reduce_scatter" if dst.is_split else "all_reduce"
    return "slice" if dst.is_split else "keep" if dst.is_extreme else "keep_first"


def plan_text(src: NdSbp, moves: Sequence[Step]) -> str:
    """Format a plan that begins at the SBPs ``src`` as one line.

    ``(S(0), P) -all_reduce(1)-> (S(0), B) -all_gather(0)-> (B, B)``
    """
    state = list(src)
    text = _sbps_text(state)
    for move in moves:
        if isinstance(move, Exchange):
            state = list(move.dst.sbp)
        else:
            state[move.axis] = move.dst
        text += f" {move.arrow} {_sbps_text(state)}"
    return text


def _sbps_text(entries: Sequence[Sbp]) -> str:
    return str(entries[0]) if len(entries) == 1 else f"({', '.join(map(str, entries))})"


def _rank_rows(placement: Placement) -> str:
    # A grid prints as rows, as it does in the repr of its placement.
    return placement._ranks_text().removeprefix("[").removesuffix("]")
