"""Check that the pieces of a tensor cover it exactly: without overlap and without gaps."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_PRIME = (1 << 61) - 1
# So that the author of a forged file cannot predict the marks.
_system_random = random.SystemRandom()


def check_pieces(key: str, metadata: Any) -> None:
    """Raise ValueError unless the pieces in ``metadata``, of the tensor ``key``, cover it exactly.

    ``metadata`` is a ``TensorStorageMetadata``.
    """
    shape, chunks = tuple(metadata.size), metadata.chunks
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"{key} of shape {shape} has a piece of other dims, {chunk}")
        box = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(min(a, n) < 0 or a + n > whole for a, n, whole in box):
            raise ValueError(f"{key} of shape {shape} has a piece outside it, {chunk}")
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"{key} of shape {shape} is not covered by its pieces")
    # The volumes add up, so a gap implies an overlap.
    if len(chunks) > 1 and not _is_tiled_by(shape, chunks):
        raise ValueError(f"{key} of shape {shape} has pieces that overlap")


def _is_tiled_by(shape: Sequence[int], chunks: Any) -> bool:
    """Return whether each element of a tensor of ``shape`` is in exactly one of ``chunks``.

    Each index of a dim, where a box may begin or end, gets a random number. By these numbers, a box
    of rows [a, b) and columns [c, d) has the volume ``(r[b] - r[a]) * (q[d] - q[c])``. If the boxes
    tile the tensor, their volumes add up to that of the tensor. If they do not, the sums are equal
    by chance once in 2 ** 55 cases. So the boxes need not be compared pair by pair.
    """
    rulers = [defaultdict(lambda: _system_random.randrange(_PRIME)) for _ in shape]

    def volume(starts: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for ruler, a, n in zip(rulers, starts, sizes, strict=True):
            product = product * (ruler[a + n] - ruler[a]) % _PRIME
        return product

    total = sum(volume(c.offsets, c.sizes) for c in chunks) % _PRIME
    return total == volume([0] * len(shape), shape)
