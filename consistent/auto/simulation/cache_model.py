"""Estimate of the share of an op's inputs that the caches no longer hold.

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
    """Estimate of which memory is still in a rank's cache.

    It records how many bytes each rank had touched in total when it last touched each memory:
    memory is out of the cache if more than the size of the cache was touched since.

    Args:
        cache_bytes: a rank's share of the largest cache of its host.
    """

    def __init__(self, cache_bytes: float) -> None:
        self._cache = cache_bytes
        self._clocks: Counter[int] = Counter()  # rank -> bytes that it has touched so far
        self._last: dict[int, int] = {}

    def made(self, rank: int, memories: Memories) -> None:
        """Note that ``rank`` has written ``memories``, given as (number, bytes) pairs."""
        now = self._clocks[rank]
        for number, nbytes in memories:
            self._last[number] = now
            self._clocks[rank] += nbytes

    def cold(self, rank: int, memories: Memories) -> float:
        """Note that ``rank`` reads ``memories``; return the share of their bytes not in its cache.

        The share is between 0 and 1. ``memories`` are (number, bytes) pairs.
        """
        now, total, cold = self._clocks[rank], 0, 0
        for number, nbytes in memories:
            last = self._last.get(number)
            total += nbytes
            # As a least-recently-used cache: more bytes touched since then have displaced this
            # memory.
            cold += nbytes * (last is None or now - last > self._cache)
            self._last[number] = now
        self._clocks[rank] += total
        return cold / total if total else 0.0
