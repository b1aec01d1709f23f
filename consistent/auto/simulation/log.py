"""Log of what a simulated process did, in order: ops, messages, memory and marks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Op:
    """One torch op on shards, run by ``rank``.

    Args:
        placement: placement of its tensors, if they are global; ranks outside run the op on
            ``meta``.
        cold: the share of its inputs that no cache holds, 0 to 1.
    """

    rank: int
    work: Any  # machines.work.Work
    where: str
    placement: Any = None
    cold: float = 0.0


@dataclass(slots=True)
class Message:
    """One communication.

    Args:
        rank: the rank that makes the call.
        bytes: bytes that it sends.
        ranks: the ranks that take part.
        start, wait: number of a reduction that begins or ends here; 0 for calls that do both at
            once.
    """

    rank: int
    name: str
    bytes: int
    ranks: tuple[int, ...]
    where: str
    start: int = 0
    wait: int = 0


@dataclass(slots=True)
class Held:
    """Memory of ``bytes`` that ``rank`` allocates (> 0) or frees (< 0).

    ``number`` identifies the memory.
    """

    rank: int
    number: int
    bytes: int
    message: bool = False  # it is the result of a message


@dataclass(slots=True)
class Mark:
    """A point that the program reaches: "forward", "step" (of an optimizer), "built"."""

    what: str


@dataclass(slots=True)
class Scheduled:
    """A step of stages that a schedule ran; ``run`` has its parts (``stages.Followed``)."""

    run: Any


@dataclass
class Log:
    """Events in order, and the values that the program read."""

    events: list[Any] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # values that were taken for 0, by line

    def reads(self, what: str) -> None:
        """Note that a value was read."""
        self.read[what] = self.read.get(what, 0) + 1
