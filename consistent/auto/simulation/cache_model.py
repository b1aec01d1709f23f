"""How much of what an op is given the caches hold no longer.

```
touched   a 6 MB   b 6 MB   c 6 MB   a 6 MB          of a cache of 16 MB
          <------- 18 MB ---------->                 a is cold again
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Memories = Iterable[tuple[int, int]]  # (number, bytes)


class CacheModel:
    """For each memory, how much its rank had touched when it touched it last.

    Args:
        cache_bytes: a rank's share of the largest cache of its host.
    """

    def __init__(self, cache_bytes: float) -> None:
        self._cache = cache_bytes
        self._clocks: Counter[int] = Counter()  # rank -> bytes that it has touched so far
        self._last: dict[int, int] = {}

    def made(self, rank: int, memories: Memories) -> None:
        """They were written."""
        now = self._clocks[rank]
        for number, nbytes in memories:
            self._last[number] = now
            self._clocks[rank] += nbytes

    def cold(self, rank: int, memories: Memories) -> float:
        """They are read: the share of their bytes that comes from memory, 0 to 1."""
        now, total, cold = self._clocks[rank], 0, 0
        for number, nbytes in memories:
            last = self._last.get(number)
            total += nbytes
            cold += nbytes * (last is None or now - last > self._cache)
            self._last[number] = now
        self._clocks[rank] += total
        return cold / total if total else 0.0
