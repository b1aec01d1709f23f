"""Forms of layer, RMS, group, batch and instance norm where a normalized dim is split.

The ranks all-reduce the sums of their shards, first for the mean, then for the squared deviations
from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....spec import S
from ...join_results import widen
from ...registry import Shards, form


def moments(shard: Shards, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (mean, biased variance) of ``x`` over ``dims`` of all shards, with dims kept."""
    n = math.prod(shard.specs[0].shape[d] for d in dims)
    mean = shard.sum(x.sum(tuple(dims), keepdim=True)) / n
    return mean, shard.sum((x - mean).square().sum(tuple(dims), keepdim=True)) / n


def apply_affine(shard: Shards, y: Tensor, shape: Sequence[int]) -> Tensor:
    """Apply the call's affine parameters to a normalized ``y``: y * weight + bias.

    Weight and bias may be absent, and are reshaped to ``shape``. The result has the dtype of the
    op's output.
    """
    weight = shard.get("weight")
    bias = shard.get("bias") if "bias" in shard.call.params else None
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y.to(shard.outs[0].dtype)


def _channel_shape(x: Tensor) -> list[int]:
    """Return the shape in which a vector of one number per channel broadcasts to ``x``.

    ``[1, -1, 1, 1]`` for images [n, c, h, w].
    """
    return [1, -1] + [1] * (x.ndim - 2) if x.shape[1] else [1, 0] + [1] * (x.ndim - 2)


def _normalized_dims(shard: Shards) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (the dims that layer_norm or rms_norm normalizes, local shape of its weight)."""
    x, count = shard.tensors[0], len(shard.get("normalized_shape"))
    return tuple(range(x.ndim - count, x.ndim)), tuple(x.shape[x.ndim - count :])


@form("layer_norm")
def _layer_norm(shard: Shards) -> Any:
    dims, shape = _normalized_dims(shard)
    x = widen(shard.tensors[0])
    mean, variance = moments(shard, x, dims)
    scale = (variance + shard.get("eps", 1e-5)).rsqrt()
    y = apply_affine(shard, (x - mean) * scale, shape)
    return y if len(shard.outs) == 1 else (y, *_saved_statistics(shard, mean, scale))


def _saved_statistics(shard: Shards, *statistics: Tensor) -> list[Tensor]:
    """Return the statistics that native_layer_norm also returns: mean and 1 / deviation.

    They are converted to the dtypes in which it returns them.
    """
    return [t.detach().to(out.dtype) for t, out in zip(statistics, shard.outs[1:], strict=True)]


@form("rms_norm")
def _rms_norm(shard: Shards) -> Tensor:
    dims, shape = _normalized_dims(shard)
    x, eps = widen(shard.tensors[0]), shard.get("eps")
    n = math.prod(shard.specs[0].shape[d] for d in dims)
    square = shard.sum(x.square().sum(dims, keepdim=True)) / n
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return apply_affine(shard, x * (square + eps).rsqrt(), shape)


@form("group_norm")
def _group_norm(shard: Shards) -> Tensor:
    """Run group_norm where channels or positions are split.

    Each rank gets the statistics of all groups, [samples, groups], and normalizes its channels by
    those of their groups.
    """
    x, groups = widen(shard.tensors[0]), shard.get("num_groups")
    logical = shard.specs[0].shape
    axes_of_channels = [a for a, e in enumerate(shard.specs[0].sbp) if e is S(1)]
    if groups % shard.placement.size == 0 and set(shard.axes) <= set(axes_of_channels):
        # Every rank has whole groups, so there is nothing to join.
        own_groups = groups * x.shape[1] // logical[1]
        eps = shard.get("eps", 1e-5)
        return torch.group_norm(
            shard.tensors[0], own_groups, shard.get("weight"), shard.get("bias"), eps
        )
    size = logical[1] // groups
    first = shard.region()[0][1]
    group = torch.arange(first, first + x.shape[1], device=x.device) // size
    dims, n = tuple(range(2, x.ndim)), size * math.prod(logical[2:])

    def mean(values: Tensor) -> Tensor:
        by_channel = values.sum(dims) if dims else values
        by_group = values.new_zeros(x.shape[0], groups).index_add(1, group, by_channel)
        of_channel = shard.sum(by_group).index_select(1, group) / n
        return of_channel.reshape(*of_channel.shape, *[1] * len(dims))

    centred = x - mean(x)
    y = centred * (mean(centred.square()) + shard.get("eps", 1e-5)).rsqrt()
    return apply_affine(shard, y, _channel_shape(x))


@form("batch_norm")
def _batch_norm(shard: Shards) -> Tensor:
    """Run batch_norm in training mode with the statistics of the whole batch.

    Every rank updates its copy of the running statistics in the same way.
    """
    x = widen(shard.tensors[0])
    dims = [d for d in range(x.ndim) if d != 1]
    mean, variance = moments(shard, x, dims)
    n = math.prod(shard.specs[0].shape[d] for d in dims)
    momentum = shard.get("momentum", 0.1)
    # As in torch, running_var takes the unbiased variance, and the output uses the biased one.
    unbiased = variance * (n / max(n - 1, 1))
    for name, statistic in (("running_mean", mean), ("running_var", unbiased)):
        running = shard.get(name)
        if running is not None:
            with torch.no_grad():
                running.lerp_(statistic.reshape(running.shape).to(running.dtype), momentum)
    return apply_affine(
        shard, (x - mean) * (variance + shard.get("eps", 1e-5)).rsqrt(), _channel_shape(x)
    )


@form("instance_norm")
def _instance_norm(shard: Shards) -> Tensor:
    x = widen(shard.tensors[0])
    mean, variance = moments(shard, x, range(2, x.ndim))
    return apply_affine(
        shard, (x - mean) * (variance + shard.get("eps", 1e-5)).rsqrt(), _channel_shape(x)
    )
