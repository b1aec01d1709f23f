"""How fast the host is just now, told by a few fixed calls that all of its cores make.

The cores of a shared host are slower for moments or minutes, because of its other guests or its
clock. What is measured counts as it would have been at the host's usual pace: the mean of some
seconds, when it was looked at first.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch

USUAL_S = 8.0  # of the first look
NOW_S = 0.02  # of another one
VALID_S = 0.25  # for which it counts


@lru_cache
def _operands() -> tuple[torch.Tensor, ...]:
    return torch.ones(256, 256), torch.ones(1 << 16), torch.ones(1 << 22)


def fixed_calls() -> None:
    """Products, ops in a cache, and one on more than most caches hold."""
    square, small, large = _operands()
    for _ in range(4):
        torch.mm(square, square)
        for _ in range(10):
            torch.add(small, small)
    large.mul_(1.0)


def fixed_seconds(during: float) -> float:
    """What they take in the mean while they are made for ``during`` seconds."""
    fixed_calls()
    begin, made = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < during or not made:
        fixed_calls()
        made += 1
    return passed / made


class HostSpeed:
    """The host's pace, where 1 is the usual one.

    Args:
        usual: seconds that the fixed calls take usually.
    """

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self._now, self._until = 1.0, 0.0

    @property
    def is_known(self) -> bool:
        """Whether it was looked at a moment ago."""
        return time.monotonic() < self._until

    def look(self) -> None:
        """See how fast the host is now."""
        self._now = self.usual / fixed_seconds(NOW_S)
        self._until = time.monotonic() + VALID_S

    def usually(self, seconds: float) -> float:
        """What takes so many seconds now, at the usual pace."""
        return seconds * self._now
