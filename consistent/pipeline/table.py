"""The table of a schedule: what the ranks of each placement do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """What one line of the table does next."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A table of actions.

    Args:
        name: as it was asked for.
        lines: for each distinct placement, in the order of stages, what its ranks do.
        line_of: stage -> its line.
        micro_batches: their number.
    """

    name: str
    lines: tuple[tuple[Action, ...], ...]
    line_of: tuple[int, ...]
    micro_batches: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.line_of)

    def forwards(self) -> Schedule:
        """The actions that are forwards."""
        lines = tuple(tuple(a for a in line if a.kind == "F") for line in self.lines)
        return Schedule(self.name, lines, self.line_of, self.micro_batches)
