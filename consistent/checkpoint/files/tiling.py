"""Whether pieces make up a tensor: none overlap, and none is missing."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_PRIME = (1 << 61) - 1
_drawn = random.SystemRandom()  # whoever made a file up does not know the rulers


def check_pieces(key: str, found: Any) -> None:
    """Raise ValueError unless the pieces of a ``TensorStorageMetadata`` make up the tensor."""
    shape, chunks = tuple(found.size), found.chunks
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"{key} of shape {shape} has a piece of other dims, {chunk}")
        box = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(min(a, n) < 0 or a + n > whole for a, n, whole in box):
            raise ValueError(f"{key} of shape {shape} has a piece outside it, {chunk}")
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"{key} of shape {shape} is not covered by its pieces")
    if len(chunks) > 1 and not _tile(shape, chunks):
        raise ValueError(f"{key} of shape {shape} has pieces that overlap")


def _tile(shape: Sequence[int], chunks: Any) -> bool:
    """Whether each element is in one piece.

    Each dim gets a ruler with marks at random places, in order or not. Volumes measured by such
    rulers add up to that of the whole if the pieces tile it. If they do not, the difference is a
    polynomial of the marks that is not zero, and zero at random marks once in 2 ** 55 cases. So
    there is nothing to be compared pair by pair.
    """
    rulers = [defaultdict(lambda: _drawn.randrange(_PRIME)) for _ in shape]

    def volume(starts: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for ruler, a, n in zip(rulers, starts, sizes, strict=True):
            found = found * (ruler[a + n] - ruler[a]) % _PRIME
        return found

    measured = sum(volume(c.offsets, c.sizes) for c in chunks) % _PRIME
    return measured == volume([0] * len(shape), shape)
