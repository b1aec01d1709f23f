"""Evening out: rows that ranks hold in unequal numbers become balanced pieces.

```
rank 0   a b c d e   ->   a b c        rows keep their order; only those that cross a border move
rank 1   f           ->   d e f
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirrored.transports.default import current

from ..movement.differentiable import swap
from .join_results import slot
from .registry import Shards
from .whole_numbers import whole_numbers


def gathered(shard: Shards, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Every rank's ``x``, in order, from ranks with ``counts`` rows; not differentiable."""
    shapes = [(n, *x.shape[1:]) for n in counts]
    return current().all_gather(x.contiguous(), shapes, shard.ranks)


def numbers(shard: Shards, own: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's few integers, in order."""
    mine = torch.tensor([own], device=device)
    every = torch.cat(gathered(shard, mine, [1] * len(shard.ranks)))
    found = whole_numbers(every.flatten(), lambda: [*own] * len(shard.ranks))
    return [found[k : k + len(own)] for k in range(0, len(found), len(own))]


def evened(
    shard: Shards, x: Tensor, held: Sequence[int], pieces: Sequence[tuple[int, int]]
) -> Tensor:
    """This rank's piece of the rows ``x`` of all ranks, which hold ``held`` of them; ``pieces``
    are (start, size) of each. Differentiable."""
    if list(held) == [size for _, size in pieces]:
        return x
    firsts = [sum(held[:k]) for k in range(len(held))]
    counts = [
        [_shared(*rows, *piece) for piece in pieces] for rows in zip(firsts, held, strict=True)
    ]
    return swap(x, torch.tensor(counts), slot(shard)[0], shard.ranks)


def _shared(a: int, count: int, b: int, size: int) -> int:
    """How many integers two ranges share."""
    return max(0, min(a + count, b + size) - max(a, b))
