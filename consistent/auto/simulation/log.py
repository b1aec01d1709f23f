"""What a simulated process did, in order: ops, messages, memory and marks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Op:
    """One op of torch on shards, done by ``rank``.

    Args:
        placement: of its tensors, if they are global; ranks outside it follow on `meta`.
        cold: the share of what it is given that no cache holds, 0 to 1.
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
        rank: that makes the call.
        bytes: that it sends.
        ranks: that take part.
        start, wait: numbers of a reduction that begins or ends here; others do both at once.
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
    """Memory of ``bytes`` that is taken (> 0) or let go of (< 0) by ``rank``; ``number`` tells
    memories apart."""

    rank: int
    number: int
    bytes: int
    message: bool = False  # it is the result of a message


@dataclass(slots=True)
class Mark:
    """The program comes to something: "forward", "step" (of an optimizer), "built"."""

    what: str


@dataclass(slots=True)
class Scheduled:
    """A step of stages was run by a schedule; ``run`` has the parts (stages.Played)."""

    run: Any


@dataclass
class Log:
    """Events in order, and what was noticed."""

    events: list[Any] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # values that were taken for 0, by line

    def reads(self, what: str) -> None:
        """A value was read."""
        self.read[what] = self.read.get(what, 0) + 1
