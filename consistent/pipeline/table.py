"""Table of a schedule: the actions of each placement's ranks, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ACTION_KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """Forward or backward of one micro-batch in one stage: what a rank does at a time.

    ``kind`` is "F" (forward), "B" (backward), or one half of a backward: "I" computes the gradients
    of the stage's inputs, "W" those of its parameters.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule as a table: for each placement, the order of forwards and backwards.

    Args:
        name: the name of the schedule, as the user gave it.
        lines: for each distinct placement, in the order of stages, the actions of its ranks.
        line_of: for each stage, the index in ``lines`` of its placement.
        micro_batches: the number of micro-batches.
    """

    name: str
    lines: tuple[tuple[Action, ...], ...]
    line_of: tuple[int, ...]
    micro_batches: int

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.line_of)

    def forwards(self) -> Schedule:
        """Return the schedule with only its forwards, for a batch without backward."""
        lines = tuple(tuple(a for a in line if a.kind == "F") for line in self.lines)
        return Schedule(self.name, lines, self.line_of, self.micro_batches)
