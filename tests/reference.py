"""Scatter a full tensor and gather it again: the reference for everything else.

``scatter`` and ``gather`` take a spec, ``cut`` and ``join`` an SBP for each axis of a grid. P is
split at random and unevenly, so that no wrong rule passes by luck.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from consistent.spec import NdSbp, Partial, Sbp, Split, TensorSpec, piece
from mirrored.reduction import identity, ordered_reduce

Tensors = list[Tensor]
Noise = Callable[[Tensor, torch.Generator], Tensor]


def integers(like: Tensor, random: torch.Generator) -> Tensor:
    """Numbers from -5 to 5 of the shape and dtype of ``like``, whose sums are exact."""
    return torch.randint(-5, 6, like.shape, generator=random).to(like.dtype)


def scatter(full: Tensor, spec: TensorSpec, seed: int = 0) -> Tensors:
    """The shards of ``full`` for all coordinates of the grid, in row-major order.

    Addends are of integers. For integers the split is exact.
    """
    random = torch.Generator().manual_seed(seed)
    return cut(full, spec.sbp, spec.placement.shape, random)


def gather(shards: Sequence[Tensor], spec: TensorSpec) -> Tensor:
    """The full tensor; fails if B shards differ."""
    return join(shards, spec.sbp, spec.placement.shape, None)


def cut(
    x: Tensor,
    sbp: NdSbp,
    shape: tuple[int, ...],
    random: torch.Generator,
    noise: Noise = integers,
) -> Tensors:
    """Shards of the full tensor ``x`` in grid order of a placement of ``shape``, outer axis
    first. ``noise`` makes addends of P, of which the last is what is left."""
    if not shape:
        return [x.clone()]
    parts = _cut(x, sbp[0], shape[0], random, noise)
    return [shard for part in parts for shard in cut(part, sbp[1:], shape[1:], random, noise)]


def join(
    shards: Sequence[Tensor], sbp: NdSbp, shape: tuple[int, ...], tolerance: float | None = 1e-7
) -> Tensor:
    """The full tensor. Fails if B shards differ by more than ``tolerance``, relative and absolute,
    or, where that is None, by more than torch allows for their dtype."""
    if not shape:
        return shards[0]
    step = len(shards) // shape[0]
    parts = [
        join(shards[k : k + step], sbp[1:], shape[1:], tolerance)
        for k in range(0, len(shards), step)
    ]
    return _join(parts, sbp[0], tolerance)


def assert_close(
    found: Tensor,
    wanted: Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    msg: Callable[[str], str] | None = None,
) -> None:
    """``torch.testing.assert_close`` where NaN equals NaN. Where tensors agree, which is nearly
    always, that is not called: it takes a hundred microseconds."""
    if not _agree(found, wanted, rtol, atol):
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=rtol, atol=atol, msg=msg)


_FAST = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _agree(found: Tensor, wanted: Tensor, rtol: float | None, atol: float | None) -> bool:
    """Whether they are alike without a doubt: False says nothing."""
    if not (_is_plain(found) and _is_plain(wanted)):
        return False
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if found.dtype is torch.complex32:  # torch.equal doesn't take it
        return False
    if torch.equal(found, wanted):
        return True
    if rtol is None or atol is None or found.dtype not in _FAST:
        return False
    return torch.allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.layout == torch.strided


def shard_at(shards: Sequence[Tensor], spec: TensorSpec, rank: int) -> Tensor:
    """The shard of a world rank, which is a ``meta`` tensor outside the placement."""
    at = spec.placement.coordinate_of(rank)
    if at is None:
        return torch.empty(spec.local_shape(None), dtype=spec.dtype, device="meta")
    return shards[sum(c * math.prod(spec.placement.shape[a + 1 :]) for a, c in enumerate(at))]


def in_grid_order(by_rank: Sequence[Tensor], spec: TensorSpec) -> Tensors:
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


# -- along one axis --------------------------------------------------------------------------------


def _cut(x: Tensor, entry: Sbp, parts: int, random: torch.Generator, noise: Noise) -> Tensors:
    if isinstance(entry, Split):
        n = x.shape[entry.dim]
        if entry.cut is None:
            return [x.narrow(entry.dim, *piece(n, parts, k)) for k in range(parts)]
        return [x.index_select(entry.dim, _items(entry, n, parts, k)) for k in range(parts)]
    if entry.is_broadcast:
        return [x] * parts
    if isinstance(entry, Partial) and entry.is_extreme:
        return _bounds(x, entry.op, parts, random, noise)
    addends = [noise(x, random) for _ in range(parts - 1)]
    return [*addends, x - sum(addends)] if addends else [x]


@functools.cache
def _order(entry: Split, n: int, parts: int) -> Tensor | None:
    """Where each item is among those of the first rank, the second, ...; None: in their order."""
    order = torch.cat([_items(entry, n, parts, k) for k in range(parts)]).argsort()
    return None if torch.equal(order, torch.arange(n)) else order


@functools.cache
def _items(entry: Split, n: int, parts: int, rank: int) -> Tensor:
    """The items that a rank holds, found by asking of each whose it is: the reference for cuts."""
    return torch.tensor([i for i in range(n) if _owner(entry, n, parts, i) == rank]).long()


def _owner(entry: Split, n: int, parts: int, item: int) -> int:
    if entry.cut is None:
        return _chunk_of(n, parts, item)
    each = entry.cut.of
    sizes = [n] if each is None else each if isinstance(each, tuple) else [each] * (n // each)
    for size in sizes:
        if item < size:
            break
        item -= size
    if entry.cut.blocks is not None:
        return item // entry.cut.blocks % parts
    if entry.cut.zigzag:
        chunk = _chunk_of(size, 2 * parts, item)
        return min(chunk, 2 * parts - 1 - chunk)
    if entry.cut.sizes is None:
        return _chunk_of(size, parts, item)
    return next(k for k in range(parts) if item < sum(entry.cut.sizes[: k + 1]))


def _chunk_of(n: int, count: int, item: int) -> int:
    return next(k for k in range(count) if item < sum(piece(n, count, j)[1] for j in range(k + 1)))


def _bounds(x: Tensor, op: str, parts: int, random: torch.Generator, noise: Noise) -> Tensors:
    """P(max), P(min): one rank has the element, the others one that does not beat it, or the
    identity."""
    winner = torch.randint(0, parts, x.shape, generator=random)
    worse = torch.minimum if op == "max" else torch.maximum
    worst = torch.full_like(x, identity(x.dtype, op))
    pieces = []
    for rank in range(parts):
        is_worst = torch.rand(x.shape, generator=random) < 0.3
        loser = torch.where(is_worst, worst, worse(x, noise(x, random)))
        pieces.append(torch.where(winner == rank, x, loser))
    return pieces


def _join(shards: Sequence[Tensor], entry: Sbp, tolerance: float | None) -> Tensor:
    if isinstance(entry, Split):
        joined, parts = torch.cat(list(shards), entry.dim), len(shards)
        order = _order(entry, joined.shape[entry.dim], parts)
        return joined if order is None else joined.index_select(entry.dim, order)
    if isinstance(entry, Partial) and entry.is_extreme:
        return ordered_reduce(shards, entry.op)
    if entry.is_partial:
        return sum(shards[1:], shards[0])
    for other in shards[1:]:
        assert_close(other, shards[0], rtol=tolerance, atol=tolerance, msg=_differ)
    return shards[0]


def _differ(text: str) -> str:
    return f"ranks differ where all hold the same: {text}"
