"""Detection of slow ranks, by the time that each rank works in a step without waiting for others,
compared with the median of all ranks."""

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
    """Detector of ranks that need more than ``times`` as long as the median rank in ``steps``
    consecutive steps.

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
        """Start with a new world of ranks. A collective of them."""
        if self._waiting is None:
            found = put_around(Waiting)
            assert isinstance(found, Waiting)
            self._waiting = found
        self._names = gathered(f"process {os.getpid()} of {socket.gethostname()}")
        self._counts = [0] * current().size
        self.start()

    def start(self) -> None:
        """Start to measure a step."""
        assert self._waiting is not None
        self._since, self._waited = time.perf_counter(), self._waiting.seconds

    def note(self) -> bytes:
        """Return how long this rank has worked since ``start``, without waiting, as bytes for the
        others."""
        assert self._waiting is not None
        waited = self._waiting.seconds - self._waited
        return _SECONDS.pack(time.perf_counter() - self._since - waited)

    def found(self, notes: list[bytes]) -> dict[int, str]:
        """Return the ranks that have now been slow for ``steps`` consecutive steps, with a text
        about each. It is computed from the notes of all ranks, so it is the same on all of them."""
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
