"""Reductions and softmax along a split dim: each rank reduces its shard, the small results
are joined.

An empty shard takes part with the identity of its reduction, so that no rank leaves the others
waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.ordered import identity

from ..rules.reduce import norm_of, spread_of
from ..spec import Split
from .forms import Shards, form
from .stacks import dropped, own_part, parted, slot, stack, tracked, wide

_LAST = torch.iinfo(torch.int64).max


def local_extreme(x: Tensor, dims: Sequence[int], is_max: bool) -> Tensor:
    """amax or amin with ``keepdim=True``; the identity where ``dims`` are empty."""
    if not dims:
        return x
    if all(x.shape[d] for d in dims):
        return x.amax(tuple(dims), True) if is_max else x.amin(tuple(dims), True)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_full(shape, identity(x.dtype, "max" if is_max else "min"))


class _Evenly(torch.autograd.Function):
    """value -> value, with a gradient that goes to the elements of ``x`` in ``ties``, shared
    evenly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, ties: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(ties, count)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ties, count = ctx.saved_tensors
        return grad * ties / count, None, None, None


def extreme_over(shard: Shards, x: Tensor, dims: Sequence[int], is_max: bool) -> Tensor:
    """amax or amin over ``dims`` of all shards, ``keepdim=True``; NaN wins, ties share the
    gradient."""
    with torch.no_grad():
        every = stack(shard, local_extreme(x, dims, is_max))
        value = every.amax(0) if is_max else every.amin(0)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return value
    with torch.no_grad():
        ties = x == value
        if not shard.call.name.startswith(
            "a"
        ):  # amax and amin let no gradient into NaN, max and min do
            ties |= x.isnan() & value.isnan()
    return evenly(shard, x, value, ties, dims)


def evenly(shard: Shards, x: Tensor, value: Tensor, ties: Tensor, dims: Sequence[int]) -> Tensor:
    """``value``, the same on every rank and kept in ``dims``; its gradient goes to ``ties``."""
    with torch.no_grad():
        count = shard.sum(ties.sum(tuple(dims), keepdim=True))
        once = value if shard.is_first else torch.zeros_like(value)
    return shard.sum(_Evenly.apply(x, once, ties, count))


# -- forms -----------------------------------------------------------------------------------------


def _keepdim(shard: Shards) -> bool:
    return bool(shard.get("keepdim", False))


def _count(shard: Shards, dims: Sequence[int]) -> int:
    return math.prod(shard.specs[0].shape[d] for d in dims)


@form("mean")
def _mean(shard: Shards) -> Tensor:
    """Sum of the shard over the logical count: P."""
    x, dims = shard.tensors[0], shard.call.dims()
    return x.sum(dims, _keepdim(shard), dtype=shard.outs[0].dtype) / _count(shard, dims)


@form("nanmean")
def _nanmean(shard: Shards) -> Tensor:
    x, dims = shard.tensors[0], shard.call.dims()
    count = shard.sum((~x.isnan()).sum(dims, _keepdim(shard)))
    return shard.sum(wide(x).nansum(dims, _keepdim(shard))).div(count).to(shard.outs[0].dtype)


@form("truth")
def _truth(shard: Shards) -> Tensor:
    """any and all."""
    found = shard.run(*shard.args, **shard.kwargs)
    every = parted(shard, found)
    return (every.any(0) if shard.call.name == "any" else every.all(0)).to(found.dtype)


@form("extreme")
def _extreme(shard: Shards) -> Tensor:
    """amax, amin, and max and min of all elements."""
    x, dims = shard.tensors[0], shard.call.dims()
    is_max = shard.call.name.endswith("max")
    keepdim = shard.call.name.startswith("a") and _keepdim(shard)
    if tracked(x):
        value = own_part(shard, extreme_over(shard, x, dims, is_max), () if keepdim else dims)
    else:
        every = parted(shard, local_extreme(x, dims, is_max), () if keepdim else dims)
        value = every.amax(0) if is_max else every.amin(0)
    return dropped(value, dims, keepdim)


@form("bound")
def _bound(shard: Shards) -> Tensor:
    """The shard's own largest or smallest, which bounds that of all."""
    keepdim = shard.call.name.startswith("a") and _keepdim(shard)
    dims, is_max = shard.call.dims(), shard.call.name.endswith("max")
    return dropped(local_extreme(shard.tensors[0], dims, is_max), dims, keepdim)


@form("extremes")
def _extremes(shard: Shards) -> Any:
    """aminmax."""
    x, dims, keepdim = shard.tensors[0], shard.call.dims(), _keepdim(shard)
    low, high = (
        dropped(extreme_over(shard, x, dims, is_max), dims, keepdim) for is_max in (False, True)
    )
    return torch.return_types.aminmax((low, high))


@form("extreme_index")
def _extreme_index(shard: Shards) -> Any:
    """argmax, argmin; max and min along a dim with indices. The first index wins among equals."""
    x, dims = shard.tensors[0], shard.call.dims()
    is_max = shard.call.name.endswith("max")
    value, index = _local_winner(shard, x, is_max)
    gone = () if _keepdim(shard) else dims
    values, indices = parted(shard, value, gone), parted(shard, index, gone)
    with torch.no_grad():
        best = values.amax(0) if is_max else values.amin(0)
        ties = (values == best) | (values.isnan() & best.isnan())
        first, where = torch.where(ties, indices, _LAST).min(0)
    first = first.reshape(shard.out_shape(len(shard.outs) - 1))
    if len(shard.outs) == 1:
        return first
    chosen = dropped(values.gather(0, where.unsqueeze(0)).squeeze(0), dims, _keepdim(shard))
    return getattr(torch.return_types, shard.call.name)((chosen, first))


def _local_winner(shard: Shards, x: Tensor, is_max: bool) -> tuple[Tensor, Tensor]:
    """(value, logical index) of the shard's winner, dims kept; the index is flat if the op is
    over all elements."""
    dims, starts = shard.call.dims(), shard.box()[0]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    if not all(x.shape[d] for d in dims):
        value = x.new_full(shape, identity(x.dtype, "max" if is_max else "min"))
        if x.is_floating_point():
            value = value + x.sum(
                dims, keepdim=True
            )  # 0, and a graph whose backward joins the other ranks'
        return value, x.new_full(shape, _LAST, dtype=torch.int64)
    if shard.get("dim") is not None:
        (dim,) = dims
        value, index = x.max(dim, True) if is_max else x.min(dim, True)
        return value, index + starts[dim] if x.ndim else index
    flat = x.reshape(-1)
    local = flat.argmax() if is_max else flat.argmin()
    value, index = flat.gather(0, local.reshape(1)).reshape(shape), torch.zeros_like(local)
    for at, start, n in zip(
        torch.unravel_index(local, x.shape), starts, shard.specs[0].shape, strict=True
    ):
        index = index * n + at + start
    return value, index.reshape(shape)


@form("prod")
def _prod(shard: Shards) -> Tensor:
    local = shard.run(*shard.args, **shard.kwargs)
    return parted(shard, local).prod(0, dtype=local.dtype)


@form("logsumexp")
def _logsumexp(shard: Shards) -> Tensor:
    x, dims = wide(shard.tensors[0]), shard.call.dims()
    x = x if x.is_floating_point() else x.to(shard.outs[0].dtype)
    gone = () if _keepdim(shard) else dims
    if not tracked(x):
        total = parted(shard, x.logsumexp(dims, keepdim=True), gone).logsumexp(0)
        return dropped(total, dims, _keepdim(shard)).to(shard.outs[0].dtype)
    top = shard.max(local_extreme(x.detach(), dims, True))
    top = torch.where(top.isinf(), 0, top)
    total = shard.sum((x - top).exp().sum(dims, keepdim=True)).log() + top
    total = own_part(shard, total, gone)
    return dropped(total, dims, _keepdim(shard)).to(shard.outs[0].dtype)


@form("variance")
def _variance(shard: Shards) -> Any:
    """var, std, var_mean, std_mean: the mean of all shards, then the squares around it."""
    correction, dims, keepdim = spread_of(shard.call)
    x, n = wide(shard.tensors[0]), _count(shard, dims)
    mean = shard.sum(x.sum(dims, keepdim=True)) / n
    spread = shard.sum((x - mean).square().sum(dims, keepdim=True)) / max(n - correction, 0)
    if shard.call.name.startswith("std"):
        # As torch has it, the gradient of a std of 0 is 0.
        spread = torch.where(spread == 0, 0, torch.where(spread == 0, 1, spread).sqrt())
    dtype = shard.outs[0].dtype
    spread, mean = (dropped(t, dims, keepdim).to(dtype) for t in (spread, mean))
    return (spread, mean) if shard.call.name.endswith("_mean") else spread


@form("norm")
def _norm(shard: Shards) -> Tensor:
    """A norm of order p > 0 is the norm of the shards' norms; of order inf, the largest absolute
    value."""
    order, dims = norm_of(shard.call)
    assert order is not None
    if math.isinf(order):
        x = shard.tensors[0].abs().to(shard.outs[0].dtype)
        gone = () if _keepdim(shard) else dims
        value = own_part(shard, extreme_over(shard, x, dims, order > 0), gone)
        return dropped(value, dims, _keepdim(shard))
    local = shard.run(*shard.args, **shard.kwargs)
    return torch.linalg.vector_norm(parted(shard, wide(local)), order, 0).to(local.dtype)


@form("cosine")
def _cosine(shard: Shards) -> Tensor:
    """The product of each pair and both squares are summed over the ranks."""
    (x, y), dim = map(wide, shard.tensors), shard.call.dim("dim", 1)
    sums = torch.stack([(a * b).sum(dim) for a, b in ((x, y), (x, x), (y, y))])
    split = isinstance(shard.outs[0].sbp[shard.axes[0]], Split)
    product, *squares = parted(shard, sums, (0,)).sum(0) if split else shard.sum(sums)
    least = shard.get("eps", 1e-8) ** 2
    lengths = [square.clamp_min(least).sqrt() for square in squares]
    return (product / (lengths[0] * lengths[1])).to(shard.outs[0].dtype)


@form("topk")
def _topk(shard: Shards) -> Any:
    """The k of all ranks are among each rank's own k."""
    x, dim, k = shard.tensors[0], shard.call.dim("dim", -1), shard.get("k")
    how = (shard.get("largest", True), shard.get("sorted", True))
    values, index = x.topk(k, dim, *how)
    offered, indices = (
        torch.cat(parted(shard, t).unbind(0), dim) for t in (values, index + shard.box()[0][dim])
    )
    best, place = offered.topk(k, dim, *how)
    return torch.return_types.topk((best, indices.gather(dim, place)))


@form("softmax")
def _softmax(shard: Shards) -> Tensor:
    """softmax and log_softmax: the largest of all shards, then the sum of the exponentials."""
    dim, dtype = shard.call.dim(), shard.outs[0].dtype
    x = wide(shard.tensors[0])
    x = x.to(dtype) if dtype.itemsize > x.dtype.itemsize else x
    if not tracked(x) and slot(shard)[1] <= 4:
        # One number a row from every rank is no more than two reductions send.
        total = stack(shard, x.logsumexp(dim, keepdim=True)).logsumexp(0)
        shifted = x - torch.where(total == math.inf, math.nan, total)
        return (shifted if "log" in shard.call.name else shifted.exp()).to(dtype)
    shifted = x - shard.max(local_extreme(x.detach(), (dim,), True))
    powers = shifted.exp()
    total = shard.sum(powers.sum(dim, keepdim=True))
    return (shifted - total.log() if "log" in shard.call.name else powers / total).to(dtype)
