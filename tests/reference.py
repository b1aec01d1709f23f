"""Scatter a full tensor by a spec and gather it back: the reference for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from consistent.spec import Partial, Sbp, TensorSpec, piece
from mirrored.reduction import identity, ordered_reduce


def scatter(full: Tensor, spec: TensorSpec, seed: int = 0) -> list[Tensor]:
    """The shards of ``full`` for all coordinates of the grid, in row-major order.

    P is split at random, unevenly, with negative addends. For integers the split is exact.
    """
    random = torch.Generator().manual_seed(seed)
    shards = [full]
    for n, entry in zip(spec.placement.shape, spec.sbp, strict=True):
        shards = [part for x in shards for part in _cut(x, entry, n, random)]
    return [shard.clone() for shard in shards]


def gather(shards: Sequence[Tensor], spec: TensorSpec) -> Tensor:
    """The full tensor; fails if B shards differ."""
    grid = list(zip(spec.placement.shape, spec.sbp, strict=True))
    for n, entry in reversed(grid):
        shards = [_join(shards[k : k + n], entry) for k in range(0, len(shards), n)]
    return shards[0]


def shard_at(shards: Sequence[Tensor], spec: TensorSpec, rank: int) -> Tensor:
    """The shard of a world rank, which is a ``meta`` tensor outside the placement."""
    at = spec.placement.coordinate_of(rank)
    if at is None:
        return torch.empty(spec.local_shape(None), dtype=spec.dtype, device="meta")
    return shards[sum(c * math.prod(spec.placement.shape[a + 1 :]) for a, c in enumerate(at))]


def in_grid_order(by_rank: Sequence[Tensor], spec: TensorSpec) -> list[Tensor]:
    """What the world's ranks hold, from the order of ranks to the order that ``gather`` takes."""
    return [by_rank[rank] for rank in spec.placement.ranks.ravel().tolist()]


def whole_numbers(
    shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    """A tensor of small integers, so that sums are exact in any order."""
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=random).bool()
    return torch.randint(-9, 10, tuple(shape), generator=random).to(dtype)


def _cut(x: Tensor, entry: Sbp, n: int, random: torch.Generator) -> list[Tensor]:
    if entry.is_split:
        return [x.narrow(entry.dim, *piece(x.shape[entry.dim], n, k)) for k in range(n)]
    if entry.is_broadcast:
        return [x] * n
    if isinstance(entry, Partial) and entry.is_extreme:
        return _bounds(x, entry.op, n, random)
    addends = [torch.randint(-5, 6, x.shape, generator=random).to(x.dtype) for _ in range(n - 1)]
    return [*addends, x - sum(addends)] if addends else [x]


def _bounds(x: Tensor, op: str, n: int, random: torch.Generator) -> list[Tensor]:
    """P(max), P(min): one rank has the element, the others one that does not beat it, or the
    identity."""
    winner = torch.randint(0, n, x.shape, generator=random)
    worst = torch.full_like(x, identity(x.dtype, op))
    noise = torch.randint(-5, 6, x.shape, generator=random).to(x.dtype)
    worse = torch.minimum(x, noise) if op == "max" else torch.maximum(x, noise)
    losers = [worst if rank % 2 else worse for rank in range(n)]
    return [torch.where(winner == rank, x, loser) for rank, loser in enumerate(losers)]


def _join(shards: Sequence[Tensor], entry: Sbp) -> Tensor:
    if entry.is_split:
        return torch.cat(list(shards), entry.dim)
    if isinstance(entry, Partial) and entry.is_extreme:
        return ordered_reduce(shards, entry.op)
    if entry.is_partial:
        return torch.stack(list(shards)).sum(0).to(shards[0].dtype)
    for other in shards[1:]:
        torch.testing.assert_close(other, shards[0], equal_nan=True)
    return shards[0]
