"""Detect slow ranks by the time that a rank works in a step, compared with the median of all ranks.

Time in which a rank waits for others does not count.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current, wrap_current
from mirrored.transports.waiting import TimedTransport

_SECONDS = struct.Struct("<d")


class SlowRankDetector:
    """Detector of ranks that are slow in ``steps`` consecutive steps.

    A rank is slow in a step if it works for more than ``times`` as long as the median rank.

    Args:
        times: the factor.
        steps: the number of consecutive steps.
    """

    def __init__(self, times: float, steps: int) -> None:
        self._factor, self._steps = times, steps
        self._waiting: TimedTransport | None = None
        self._started_at = self._waited_before = 0.0
        self._counts: list[int] = []  # by rank, consecutive steps in which it was slow
        self._names: list[str] = []

    def begin(self) -> None:
        """Start anew in a world with other ranks; what was measured before is forgotten.

        A collective of these ranks.
        """
        if self._waiting is None:
            waiting = wrap_current(TimedTransport)
            assert isinstance(waiting, TimedTransport)
            self._waiting = waiting
        self._names = gather_from_ranks(f"process {os.getpid()} of {socket.gethostname()}")
        self._counts = [0] * current().size
        self.start()

    def start(self) -> None:
        """Start to measure this rank's work in a step; ``note`` returns it at the end."""
        assert self._waiting is not None
        self._started_at, self._waited_before = time.perf_counter(), self._waiting.seconds

    def note(self) -> bytes:
        """Return the seconds of this rank's work since ``start``, as bytes to send to all ranks.

        The time in which this rank waited for other ranks is not counted.
        """
        assert self._waiting is not None
        waited = self._waiting.seconds - self._waited_before
        return _SECONDS.pack(time.perf_counter() - self._started_at - waited)

    def find_slow_ranks(self, notes: list[bytes]) -> dict[int, str]:
        """Return the ranks for which this is the last of ``steps`` consecutive slow steps.

        Called once in each step. A rank that stays slow is returned only once.

        Args:
            notes: the ``note`` of each rank, by rank.

        Returns:
            rank -> a text about it. The same on all ranks.
        """
        seconds = [_SECONDS.unpack(note)[0] for note in notes]
        median = statistics.median_low(seconds)
        texts = {}
        for rank, duration in enumerate(seconds):
            self._counts[rank] = self._counts[rank] + 1 if duration > self._factor * median else 0
            if self._counts[rank] == self._steps:  # equal, so that a rank is named once
                texts[rank] = (
                    f"rank {rank} ({self._names[rank]}) works {duration / median:.1f} times as "
                    f"long as the median rank: {duration:.3f} s a step beside {median:.3f} s"
                )
        return texts
