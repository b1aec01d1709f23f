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

from ..movement.differentiable import exchange_rows
from .join_results import index_and_count
from .registry import Shards
from .whole_numbers import read_ints


def gather_rows(shard: Shards, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Gather the tensor ``x`` of each rank on every rank, as a list in rank order.

    Rank k of ``shard.ranks`` has ``counts[k]`` rows; the other dims are equal. Not differentiable.
    """
    shapes = [(n, *x.shape[1:]) for n in counts]
    return current().all_gather(x.contiguous(), shapes, shard.ranks)


def gather_ints(shard: Shards, own_ints: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the integers ``own_ints`` of every rank, one list per rank in rank order.

    With ``own_ints`` ``[3]`` on rank 0 and ``[5]`` on rank 1 it is ``[[3], [5]]``. The integers are
    all-gathered in a tensor on ``device``.
    """
    own_tensor = torch.tensor([own_ints], device=device)
    all_numbers = torch.cat(gather_rows(shard, own_tensor, [1] * len(shard.ranks)))
    # A simulation takes every rank to have this rank's integers.
    values = read_ints(all_numbers.flatten(), lambda: [*own_ints] * len(shard.ranks))
    return [values[k : k + len(own_ints)] for k in range(0, len(values), len(own_ints))]


def balance_rows(
    shard: Shards, x: Tensor, row_counts: Sequence[int], pieces: Sequence[tuple[int, int]]
) -> Tensor:
    """Redistribute rows that ranks hold in unequal numbers; return this rank's balanced piece.

    Differentiable.

    Args:
        shard: the call.
        x: this rank's rows.
        row_counts: number of rows on each rank.
        pieces: (start, size) of each rank's balanced piece.
    """
    # ``row_counts`` is the same on every rank, so all ranks skip the exchange together.
    if list(row_counts) == [size for _, size in pieces]:
        return x
    firsts = [sum(row_counts[:k]) for k in range(len(row_counts))]
    counts = [
        [_overlap_size(*rows, *piece) for piece in pieces]
        for rows in zip(firsts, row_counts, strict=True)
    ]
    return exchange_rows(x, torch.tensor(counts), index_and_count(shard)[0], shard.ranks)


def _overlap_size(a: int, count: int, b: int, size: int) -> int:
    """Return how many integers the ranges ``[a, a + count)`` and ``[b, b + size)`` share."""
    return max(0, min(a + count, b + size) - max(a, b))
