"""Detect slow ranks by the time that a rank works in a step, compared with the median of all ranks.

Time in which a rank waits for others does not count.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time

from mirrored.every_rank import gathered
from mirrored.transports.default import current, put_around
from mirrored.transports.waiting import Waiting

_SECONDS = struct.Struct("<d")


class Slow:
    """Detector of ranks that are slow in ``steps`` consecutive steps.

    A rank is slow in a step if it works for more than ``times`` as long as the median rank.

    Args:
        times: the factor.
        steps: the number of consecutive steps.
    """

    def __init__(self, times: float, steps: int) -> None:
        self._times, self._steps = times, steps
        self._waiting: Waiting | None = None
        self._since = self._waited = 0.0
        self._counts: list[int] = []  # by rank, consecutive steps in which it was slow
        self._names: list[str] = []

    def begin(self) -> None:
        """Start anew in a world with other ranks; what was measured before is forgotten.

        A collective of these ranks.
        """
        if self._waiting is None:
            found = put_around(Waiting)
            assert isinstance(found, Waiting)
            self._waiting = found
        self._names = gathered(f"process {os.getpid()} of {socket.gethostname()}")
        self._counts = [0] * current().size
        self.start()

    def start(self) -> None:
        """Start to measure this rank's work in a step; ``note`` returns it at the end."""
        assert self._waiting is not None
        self._since, self._waited = time.perf_counter(), self._waiting.seconds

    def note(self) -> bytes:
        """Return the seconds of this rank's work since ``start``, as bytes to send to all ranks.

        The time in which this rank waited for other ranks is not counted.
        """
        assert self._waiting is not None
        waited = self._waiting.seconds - self._waited
        return _SECONDS.pack(time.perf_counter() - self._since - waited)

    def found(self, notes: list[bytes]) -> dict[int, str]:
        """Return the ranks for which this is the last of ``steps`` consecutive slow steps.

        Called once in each step. A rank that stays slow is returned only once.

        Args:
            notes: the ``note`` of each rank, by rank.

        Returns:
            rank -> a text about it. The same on all ranks.
        """
        seconds = [_SECONDS.unpack(note)[0] for note in notes]
        middle = statistics.median_low(seconds)
        said = {}
        for rank, each in enumerate(seconds):
            self._counts[rank] = self._counts[rank] + 1 if each > self._times * middle else 0
            if self._counts[rank] == self._steps:  # equal, so that a rank is named once
                said[rank] = (
                    f"rank {rank} ({self._names[rank]}) works {each / middle:.1f} times as long "
                    f"as the median rank: {each:.3f} s a step beside {middle:.3f} s"
                )
        return said
