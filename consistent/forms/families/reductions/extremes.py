"""Forms of extremes along a split dim: maximum, minimum, their indices, topk, any and all.

A rank with an empty shard contributes the identity of the reduction (such as -inf for a maximum),
so that all ranks take part in the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.reduction import identity

from ....movement.grad_mode import records, tracks
from ...join_results import own_part, squeeze_reduced, stack, stack_own_part
from ...registry import Shards, form

_NO_INDEX = torch.iinfo(torch.int64).max


def local_extreme(x: Tensor, dims: Sequence[int], is_max: bool) -> Tensor:
    """Return amax or amin of one shard over ``dims``, with ``keepdim=True``.

    If the shard is empty along ``dims``, it is the identity of the reduction (-inf for a maximum).
    """
    if not dims:
        return x
    if all(x.shape[d] for d in dims):
        return x.amax(tuple(dims), True) if is_max else x.amin(tuple(dims), True)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_full(shape, identity(x.dtype, "max" if is_max else "min"))


class _ShareGradient(torch.autograd.Function):
    """Identity on ``value``, an extreme of ``x``, that divides its gradient by ``count``.

    Each element of ``x`` in the mask ``ties`` gets the quotient, the others 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, ties: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(ties, count)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ties, count = ctx.saved_tensors
        return grad * ties / count, None, None, None


def extreme_over(shard: Shards, x: Tensor, dims: Sequence[int], is_max: bool) -> Tensor:
    """Return amax or amin of ``x`` over ``dims`` of all shards, with ``keepdim=True``.

    NaN wins, and ties share the gradient.
    """
    with torch.no_grad():
        extremes = stack(shard, local_extreme(x, dims, is_max))
        value = extremes.amax(0) if is_max else extremes.amin(0)
    if not records((x,)):
        return value
    with torch.no_grad():
        ties = x == value
        if not shard.call.name.startswith(
            "a"
        ):  # amax and amin pass no gradient to NaN; max and min do
            ties |= x.isnan() & value.isnan()
    return share_gradient(shard, x, value, ties, dims)


def share_gradient(
    shard: Shards, x: Tensor, value: Tensor, ties: Tensor, dims: Sequence[int]
) -> Tensor:
    """Return an extreme ``value`` whose gradient is shared by the elements of ``x`` that attain it.

    These are in the mask ``ties``. ``value`` is the same on every rank, and keeps ``dims`` with
    size 1.
    """
    with torch.no_grad():
        count = shard.sum(ties.sum(tuple(dims), keepdim=True))
        # Only one rank contributes the value to the sum below, and every rank gets a gradient.
        contribution = value if shard.is_first else torch.zeros_like(value)
    return shard.sum(_ShareGradient.apply(x, contribution, ties, count))


# -- forms -----------------------------------------------------------------------------------------


@form("any_or_all")
def _any_or_all(shard: Shards) -> Tensor:
    """Run any or all on the shard, and then on the ranks' results."""
    result = shard.run(*shard.args, **shard.kwargs)
    results = stack_own_part(shard, result)
    return (results.any(0) if shard.call.name == "any" else results.all(0)).to(result.dtype)


@form("amax_or_amin")
def _amax_or_amin(shard: Shards) -> Tensor:
    """Run amax or amin, or max or min of all elements.

    Each rank reduces its shard, then the ranks' results are reduced.
    """
    x, dims = shard.tensors[0], shard.call.dims()
    is_max = shard.call.name.endswith("max")
    keepdim = shard.call.name.startswith("a") and bool(shard.get("keepdim"))
    if tracks((x,)):
        value = own_part(shard, extreme_over(shard, x, dims, is_max), () if keepdim else dims)
    else:
        extremes = stack_own_part(shard, local_extreme(x, dims, is_max), () if keepdim else dims)
        value = extremes.amax(0) if is_max else extremes.amin(0)
    return squeeze_reduced(value, dims, keepdim)


@form("local_extreme")
def _local_extreme(shard: Shards) -> Tensor:
    """Run amax, amin, max or min on the shard only. The result is P(max) or P(min)."""
    keepdim = shard.call.name.startswith("a") and bool(shard.get("keepdim"))
    dims, is_max = shard.call.dims(), shard.call.name.endswith("max")
    return squeeze_reduced(local_extreme(shard.tensors[0], dims, is_max), dims, keepdim)


@form("aminmax")
def _aminmax(shard: Shards) -> Any:
    """Run aminmax: reduce the shard, then the ranks' results."""
    x, dims, keepdim = shard.tensors[0], shard.call.dims(), bool(shard.get("keepdim"))
    low, high = (
        squeeze_reduced(extreme_over(shard, x, dims, is_max), dims, keepdim)
        for is_max in (False, True)
    )
    return torch.return_types.aminmax((low, high))


@form("argmax_or_argmin")
def _argmax_or_argmin(shard: Shards) -> Any:
    """Run argmax, argmin, or max or min along a dim, which return indices.

    Among equals the first index wins.
    """
    x, dims = shard.tensors[0], shard.call.dims()
    is_max = shard.call.name.endswith("max")
    value, index = _local_winner(shard, x, is_max)
    dropped_dims = () if bool(shard.get("keepdim")) else dims
    values, indices = (
        stack_own_part(shard, value, dropped_dims),
        stack_own_part(shard, index, dropped_dims),
    )
    with torch.no_grad():
        best = values.amax(0) if is_max else values.amin(0)
        ties = (values == best) | (values.isnan() & best.isnan())
        first_index, rank_index = torch.where(ties, indices, _NO_INDEX).min(0)
    first_index = first_index.reshape(shard.out_shape(len(shard.outs) - 1))
    if len(shard.outs) == 1:
        return first_index
    extreme_value = squeeze_reduced(
        values.gather(0, rank_index.unsqueeze(0)).squeeze(0), dims, bool(shard.get("keepdim"))
    )
    return getattr(torch.return_types, shard.call.name)((extreme_value, first_index))


def _local_winner(shard: Shards, x: Tensor, is_max: bool) -> tuple[Tensor, Tensor]:
    """Return (extreme of the shard, its index in the logical tensor), with dims kept.

    The index is into the flattened tensor if the op reduces all elements.
    """
    dims, starts = shard.call.dims(), shard.region()[0]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    if not all(x.shape[d] for d in dims):
        value = x.new_full(shape, identity(x.dtype, "max" if is_max else "min"))
        if x.is_floating_point():
            value = value + x.sum(
                dims, keepdim=True
            )  # adds 0; keeps a graph whose backward joins the collectives
        return value, x.new_full(shape, _NO_INDEX, dtype=torch.int64)
    if shard.get("dim") is not None:
        (dim,) = dims
        value, index = x.max(dim, True) if is_max else x.min(dim, True)
        return value, index + starts[dim] if x.ndim else index
    flat = x.reshape(-1)
    local = flat.argmax() if is_max else flat.argmin()
    value, index = flat.gather(0, local.reshape(1)).reshape(shape), torch.zeros_like(local)
    for position, start, n in zip(
        torch.unravel_index(local, x.shape), starts, shard.specs[0].shape, strict=True
    ):
        index = index * n + position + start
    return value, index.reshape(shape)


@form("topk")
def _topk(shard: Shards) -> Any:
    """Run topk: the result is the k best of the k best elements of each shard."""
    x, dim, k = shard.tensors[0], shard.call.dim("dim", -1), shard.get("k")
    options = (shard.get("largest", True), shard.get("sorted", True))
    values, index = x.topk(k, dim, *options)
    candidates, indices = (
        torch.cat(stack_own_part(shard, t).unbind(0), dim)
        for t in (values, index + shard.region()[0][dim])
    )
    best, place = candidates.topk(k, dim, *options)
    return torch.return_types.topk((best, indices.gather(dim, place)))
