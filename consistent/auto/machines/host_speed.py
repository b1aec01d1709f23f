"""Measurement of the present speed of the host, by a few fixed calls that all its cores make.

The cores of a shared host are slower for moments or minutes, because of its other guests or its
clock. Measured times are therefore scaled to the usual speed of the host, which is the mean over
the first measurement of some seconds.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from . import stopwatch

USUAL_S = 8.0  # seconds of the first measurement
NOW_S = 0.02  # seconds of a later measurement
VALID_S = 0.25  # seconds for which a measurement is valid


@lru_cache
def _operands() -> tuple[torch.Tensor, ...]:
    return torch.ones(256, 256), torch.ones(1 << 16), torch.ones(1 << 22)


def fixed_calls() -> None:
    """Make the calls whose duration shows how fast the host is at the moment.

    They are matmuls, ops on a tensor that fits in a cache, and one op on a tensor that is larger
    than most caches.
    """
    square, small, large = _operands()
    for _ in range(4):
        torch.mm(square, square)
        for _ in range(10):
            torch.add(small, small)
    large.mul_(1.0)


def fixed_seconds(during: float) -> float:
    """Return the mean seconds of ``fixed_calls()``, repeated for ``during`` seconds.

    They are timed by the same clock as ops (``stopwatch.time_calls``). If ops counted their
    processor time and these calls wall-clock time, other programs would make ops seem too fast.
    """
    fixed_calls()
    single_threaded, times, passed = torch.get_num_threads() == 1, [], 0.0
    while passed < during or not times:
        seconds, wall_seconds = stopwatch.time_calls(fixed_calls, 1, single_threaded)
        times.append(seconds)
        passed += wall_seconds
    return sum(times) / len(times)


class HostSpeed:
    """Present speed of the host relative to its usual speed, to correct measured times.

    Args:
        usual_seconds: seconds that ``fixed_calls`` usually takes.
    """

    def __init__(self, usual_seconds: float) -> None:
        self.usual_seconds = usual_seconds
        self._relative_speed, self._valid_until = 1.0, 0.0

    @property
    def is_known(self) -> bool:
        """True if the speed was measured less than ``VALID_S`` seconds ago."""
        return time.monotonic() < self._valid_until

    def measure(self) -> None:
        """Measure the present speed; it is valid for ``VALID_S`` seconds."""
        self._relative_speed = self.usual_seconds / fixed_seconds(NOW_S)
        self._valid_until = time.monotonic() + VALID_S

    def at_usual_speed(self, seconds: float) -> float:
        """Convert ``seconds``, measured at the present speed, to seconds at the usual speed.

        If the host is at half its usual speed, 2 s become 1 s.
        """
        return seconds * self._relative_speed
