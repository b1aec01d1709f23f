"""Which ranks are slow: how long each works by itself in a step, beside the median of all."""

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
    """Finds ranks that need ``times`` as long as the median rank in each of ``steps`` steps.

    Args:
        times: how many times.
        steps: in how many steps one after the other.
    """

    def __init__(self, times: float, steps: int) -> None:
        self._times, self._steps = times, steps
        self._waiting: Waiting | None = None
        self._since = self._waited = 0.0
        self._counts: list[int] = []  # by rank, steps one after the other in which it was slow
        self._names: list[str] = []

    def begin(self) -> None:
        """The ranks are others now. A collective of them."""
        if self._waiting is None:
            found = put_around(Waiting)
            assert isinstance(found, Waiting)
            self._waiting = found
        self._names = gathered(f"process {os.getpid()} of {socket.gethostname()}")
        self._counts = [0] * current().size
        self.start()

    def start(self) -> None:
        """A step begins."""
        assert self._waiting is not None
        self._since, self._waited = time.perf_counter(), self._waiting.seconds

    def note(self) -> bytes:
        """How long this rank has worked since then, as the others are told."""
        assert self._waiting is not None
        waited = self._waiting.seconds - self._waited
        return _SECONDS.pack(time.perf_counter() - self._since - waited)

    def found(self, notes: list[bytes]) -> dict[int, str]:
        """The ranks that have now been slow for so many steps, and what is said of each: the same
        on all ranks, of what all have told."""
        seconds = [_SECONDS.unpack(note)[0] for note in notes]
        middle = statistics.median_low(seconds)
        said = {}
        for rank, each in enumerate(seconds):
            self._counts[rank] = self._counts[rank] + 1 if each > self._times * middle else 0
            if self._counts[rank] == self._steps:
                said[rank] = (
                    f"rank {rank} ({self._names[rank]}) works {each / middle:.1f} times as long "
                    f"as the median rank: {each:.3f} s a step beside {middle:.3f} s"
                )
        return said
