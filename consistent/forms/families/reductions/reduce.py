"""Sums, means, products, norms and softmax along a split dim.

Each rank reduces its shard, and the ranks join the small results. Torch accumulates half precision
in float32 and rounds the result once. These forms do the same: what ranks send each other is
float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....movement.grad_mode import tracks
from ....rules.families.reductions.reduce import norm_arguments, variance_arguments
from ....spec import Split
from ...join_results import (
    accumulation_dtype,
    index_and_count,
    own_part,
    squeeze_reduced,
    stack,
    stack_own_part,
    sum_addends,
    widen,
)
from ...registry import Shards, form
from .extremes import extreme_over, local_extreme


def _keepdim(shard: Shards) -> bool:
    return bool(shard.get("keepdim"))


def _element_count(shard: Shards, dims: Sequence[int]) -> int:
    return math.prod(shard.specs[0].shape[d] for d in dims)


def _widened_operand(shard: Shards) -> Tensor:
    """Return the first operand's shard in the dtype in which torch accumulates the result.

    It is float32 for half precision.
    """
    dtype = shard.outs[0].dtype
    return widen(shard.tensors[0]).to(accumulation_dtype(dtype))


@form("sum")
def _sum(shard: Shards) -> Tensor:
    """Run sum or nansum of a half-precision tensor, accumulated in float32 before it is rounded."""
    add = torch.nansum if shard.call.name == "nansum" else torch.sum
    return sum_addends(shard, add(_widened_operand(shard), shard.call.dims(), _keepdim(shard)))


@form("mean")
def _mean(shard: Shards) -> Tensor:
    """Run mean: each rank divides the sum of its shard by the logical number of elements.

    These quotients add up to the mean.
    """
    dims = shard.call.dims()
    return sum_addends(
        shard, _widened_operand(shard).sum(dims, _keepdim(shard)) / _element_count(shard, dims)
    )


@form("nanmean")
def _nanmean(shard: Shards) -> Tensor:
    x, dims = shard.tensors[0], shard.call.dims()
    count = shard.sum((~x.isnan()).sum(dims, _keepdim(shard)))
    return shard.sum(widen(x).nansum(dims, _keepdim(shard))).div(count).to(shard.outs[0].dtype)


@form("trace")
def _trace(shard: Shards) -> Tensor:
    """Run trace: sum the part of the diagonal that is in the shard.

    Element (i, j) of the shard is element (i + top, j + left) of the logical matrix.
    """
    top, left = shard.region()[0]
    return sum_addends(shard, _widened_operand(shard).diagonal(top - left).sum())


@form("prod")
def _prod(shard: Shards) -> Tensor:
    x, dim = _widened_operand(shard), shard.get("dim")
    local = x.prod() if dim is None else x.prod(dim, keepdim=_keepdim(shard))
    return stack_own_part(shard, local).prod(0, dtype=local.dtype).to(shard.outs[0].dtype)


@form("logsumexp")
def _logsumexp(shard: Shards) -> Tensor:
    x, dims = widen(shard.tensors[0]), shard.call.dims()
    x = x if x.is_floating_point() else x.to(shard.outs[0].dtype)
    dropped_dims = () if _keepdim(shard) else dims
    if not tracks((x,)):
        total = stack_own_part(shard, x.logsumexp(dims, keepdim=True), dropped_dims).logsumexp(0)
        return squeeze_reduced(total, dims, _keepdim(shard)).to(shard.outs[0].dtype)
    top = shard.max(local_extreme(x.detach(), dims, True))
    top = torch.where(top.isinf(), 0, top)  # inf - inf would be NaN
    total = shard.sum((x - top).exp().sum(dims, keepdim=True)).log() + top
    total = own_part(shard, total, dropped_dims)
    return squeeze_reduced(total, dims, _keepdim(shard)).to(shard.outs[0].dtype)


@form("variance")
def _variance(shard: Shards) -> Any:
    """Run var, std, var_mean or std_mean.

    The ranks first join the mean, then the squared deviations from it.
    """
    correction, dims, keepdim = variance_arguments(shard.call)
    x, n = widen(shard.tensors[0]), _element_count(shard, dims)
    mean = shard.sum(x.sum(dims, keepdim=True)) / n
    deviation = x - mean
    squares = (deviation * deviation.conj()).real if x.is_complex() else deviation.square()
    spread = shard.sum(squares.sum(dims, keepdim=True)) / max(n - correction, 0)
    if shard.call.name.startswith("std"):
        # As in torch, the gradient of a std of 0 is 0.
        spread = torch.where(spread == 0, 0, torch.where(spread == 0, 1, spread).sqrt())
    dtype = shard.outs[0].dtype
    spread = squeeze_reduced(spread, dims, keepdim).to(dtype)
    if not shard.call.name.endswith("_mean"):
        return spread
    return spread, squeeze_reduced(mean, dims, keepdim).to(shard.outs[1].dtype)


@form("norm")
def _norm(shard: Shards) -> Tensor:
    """Run a vector norm: reduce the shard, then the ranks' results.

    For order p > 0 it is the norm of the shards' norms; for inf or -inf, the largest or smallest
    absolute value; for 0, the number of nonzero elements.
    """
    order, dims = norm_arguments(shard.call)
    assert order is not None
    x, out = widen(shard.tensors[0]), shard.outs[0]
    x = x.to(shard.kwargs["dtype"]) if shard.kwargs.get("dtype") else x
    dropped_dims = () if _keepdim(shard) else dims
    if math.isinf(order):
        value = own_part(shard, extreme_over(shard, widen(x.abs()), dims, order > 0), dropped_dims)
        return squeeze_reduced(value, dims, _keepdim(shard)).to(out.dtype)
    local = torch.linalg.vector_norm(widen(x), order, dims, keepdim=_keepdim(shard))
    norms = stack_own_part(shard, local)
    norm = norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)
    return norm.to(out.dtype)


@form("cosine_similarity")
def _cosine_similarity(shard: Shards) -> Tensor:
    """Run cosine_similarity along a split dim: sum over the ranks, then divide.

    The sums are those of x * y, x * x and y * y, of each pair of vectors.
    """
    x, y = torch.broadcast_tensors(*map(widen, shard.tensors))
    dim = shard.get("dim") % max(x.ndim, 1)
    sums = torch.stack([(a * b).sum(dim) for a, b in ((x, y), (x, x), (y, y))])
    is_split = isinstance(shard.outs[0].sbp[shard.axes[0]], Split)
    product, *squares = stack_own_part(shard, sums, (0,)).sum(0) if is_split else shard.sum(sums)
    min_square = shard.get("eps", 1e-8) ** 2
    lengths = [square.clamp_min(min_square).sqrt() for square in squares]
    return (product / (lengths[0] * lengths[1])).to(shard.outs[0].dtype)


@form("softmax")
def _softmax(shard: Shards) -> Tensor:
    """Run softmax or log_softmax along a split dim.

    The ranks join the largest value, then the sum of exponentials, of each row.
    """
    dim, dtype = shard.call.dim(), shard.outs[0].dtype
    x = widen(shard.tensors[0])
    x = x.to(dtype) if dtype.itemsize > x.dtype.itemsize else x
    if not tracks((x,)) and index_and_count(shard)[1] <= 4:
        # For up to 4 ranks, gathering one number per row from each sends no more than the two
        # reductions below.
        total = stack(shard, x.logsumexp(dim, keepdim=True)).logsumexp(0)
        shifted = x - torch.where(total == math.inf, math.nan, total)
        return (shifted if "log" in shard.call.name else shifted.exp()).to(dtype)
    shifted = x - shard.max(local_extreme(x.detach(), (dim,), True))
    powers = shifted.exp()
    total = shard.sum(powers.sum(dim, keepdim=True))
    return (shifted - total.log() if "log" in shard.call.name else powers / total).to(dtype)
