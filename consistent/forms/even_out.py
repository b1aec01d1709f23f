"""Redistribution of rows that ranks hold in unequal numbers into balanced pieces.

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
    """Gather the tensor ``x`` of each rank on every rank, as a list in rank order.

    Rank k of ``shard.ranks`` has ``counts[k]`` rows; the other dims are equal. Not differentiable.
    """
    shapes = [(n, *x.shape[1:]) for n in counts]
    return current().all_gather(x.contiguous(), shapes, shard.ranks)


def numbers(shard: Shards, own: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the integers ``own`` of every rank, one list per rank in rank order.

    With ``own`` ``[3]`` on rank 0 and ``[5]`` on rank 1 it is ``[[3], [5]]``. The integers are
    all-gathered in a tensor on ``device``.
    """
    mine = torch.tensor([own], device=device)
    every = torch.cat(gathered(shard, mine, [1] * len(shard.ranks)))
    # A simulation takes every rank to have this rank's integers.
    found = whole_numbers(every.flatten(), lambda: [*own] * len(shard.ranks))
    return [found[k : k + len(own)] for k in range(0, len(found), len(own))]


def evened(
    shard: Shards, x: Tensor, held: Sequence[int], pieces: Sequence[tuple[int, int]]
) -> Tensor:
    """Redistribute rows that ranks hold in unequal numbers; return this rank's balanced piece.

    Differentiable.

    Args:
        shard: the call.
        x: this rank's rows.
        held: number of rows on each rank.
        pieces: (start, size) of each rank's balanced piece.
    """
    # ``held`` is the same on every rank, so all ranks skip the exchange together.
    if list(held) == [size for _, size in pieces]:
        return x
    firsts = [sum(held[:k]) for k in range(len(held))]
    counts = [
        [_shared(*rows, *piece) for piece in pieces] for rows in zip(firsts, held, strict=True)
    ]
    return swap(x, torch.tensor(counts), slot(shard)[0], shard.ranks)


def _shared(a: int, count: int, b: int, size: int) -> int:
    """Return how many integers the ranges ``[a, a + count)`` and ``[b, b + size)`` share."""
    return max(0, min(a + count, b + size) - max(a, b))
