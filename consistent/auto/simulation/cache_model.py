"""Estimate of the share of an op's inputs that the caches no longer hold.

```
touched   a 6 MB   b 6 MB   c 6 MB   a 6 MB          of a cache of 16 MB
          <------- 18 MB ---------->                 a is cold again
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Memories = Iterable[tuple[int, int]]  # (number of a storage, as in ``memory.py``; bytes)


class CacheModel:
    """Estimate of which storages are still in a rank's cache.

    For each storage it records how many bytes the rank had touched in total at the last access. The
    storage is out of the cache if the rank has touched more bytes than the cache holds since then.

    Args:
        cache_bytes: a rank's share of the largest cache of its host.
    """

    def __init__(self, cache_bytes: float) -> None:
        self._cache_bytes = cache_bytes
        self._touched_bytes: Counter[int] = Counter()  # rank -> bytes that it has touched so far
        self._last_access: dict[int, int] = {}

    def record_write(self, rank: int, memories: Memories) -> None:
        """Note that ``rank`` has written ``memories``: (number, bytes) of each storage."""
        now = self._touched_bytes[rank]
        for number, nbytes in memories:
            self._last_access[number] = now
            self._touched_bytes[rank] += nbytes

    def cold_share_of_read(self, rank: int, memories: Memories) -> float:
        """Return the share of ``memories``, which ``rank`` now reads, that is not in its cache.

        The share is between 0 and 1, and the read is recorded. ``memories`` has (number, bytes) of
        each storage.
        """
        now, total, cold = self._touched_bytes[rank], 0, 0
        for number, nbytes in memories:
            last = self._last_access.get(number)
            total += nbytes
            # In a least-recently-used cache, that many bytes touched since then have displaced it.
            cold += nbytes * (last is None or now - last > self._cache_bytes)
            self._last_access[number] = now
        self._touched_bytes[rank] += total
        return cold / total if total else 0.0
