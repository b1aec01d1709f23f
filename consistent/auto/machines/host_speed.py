"""Speed of the host at this moment, measured by a few fixed calls that all its cores make.

The cores of a shared host are slower for moments or minutes, because of its other guests or its
clock. Measured times are scaled to the host's usual speed: the mean over some seconds of the first
measurement.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch

USUAL_S = 8.0  # seconds of the first measurement
NOW_S = 0.02  # seconds of a later measurement
VALID_S = 0.25  # seconds for which a measurement is valid


@lru_cache
def _operands() -> tuple[torch.Tensor, ...]:
    return torch.ones(256, 256), torch.ones(1 << 16), torch.ones(1 << 22)


def fixed_calls() -> None:
    """Make the fixed calls: products, ops in a cache, and one op on more than most caches hold."""
    square, small, large = _operands()
    for _ in range(4):
        torch.mm(square, square)
        for _ in range(10):
            torch.add(small, small)
    large.mul_(1.0)


def fixed_seconds(during: float) -> float:
    """Return the mean seconds of the fixed calls, made repeatedly for ``during`` seconds."""
    fixed_calls()
    begin, made = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < during or not made:
        fixed_calls()
        made += 1
    return passed / made


class HostSpeed:
    """Speed of the host relative to its usual speed, which is 1.

    Args:
        usual: seconds that the fixed calls usually take.
    """

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self._now, self._until = 1.0, 0.0

    @property
    def is_known(self) -> bool:
        """True if the speed was measured a moment ago."""
        return time.monotonic() < self._until

    def look(self) -> None:
        """Measure how fast the host is now."""
        self._now = self.usual / fixed_seconds(NOW_S)
        self._until = time.monotonic() + VALID_S

    def usually(self, seconds: float) -> float:
        """Convert ``seconds`` at the present speed to seconds at the usual speed."""
        return seconds * self._now
