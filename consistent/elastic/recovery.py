"""Measures the parts of a recovery, from the loss of a rank until the training goes on.

A recovery begins when the launcher's message that a rank is lost arrives.

```
a rank is lost | leave the step | wait for the others | enter the group | build | fill
```
"""

from __future__ import annotations

import time

PARTS = (
    "to leave the step",
    "until all ranks were ready",
    "to enter the new group",
    "to build the objects",
    "to fill them",
)


class Recovery:
    """Stopwatch of this rank's last recovery, from the loss of a rank until training goes on.

    Attributes:
        seconds: name of a part, as in ``PARTS`` -> seconds. A rank that has just joined lacks the
            parts that were before.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        # None in a new process, until its first part has ended.
        self._part_start: float | None = None

    def begin(self, at: float | None) -> None:
        """Start the stopwatch, at the time ``at`` of ``time.monotonic``; None for this moment."""
        self.seconds = {}
        self._part_start = time.monotonic() if at is None else at

    def end(self, part: str) -> None:
        """Store the seconds of ``part``, one of ``PARTS``, which has ended; the next one begins."""
        now = time.monotonic()
        if self._part_start is not None:
            self.seconds[part] = now - self._part_start
        self._part_start = now


def longest_times_text(recoveries: list[dict[str, float]]) -> str:
    """Return the longest time of each part of a recovery as text.

    For example ``0.10 s to leave the step, 0.42 s until all ranks were ready, ...``.

    Args:
        recoveries: the ``seconds`` of each rank.
    """
    longest = {part: max((s.get(part, 0.0) for s in recoveries), default=0.0) for part in PARTS}
    return ", ".join(f"{seconds:.2f} s {part}" for part, seconds in longest.items())
