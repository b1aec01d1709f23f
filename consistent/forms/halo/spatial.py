"""Ops on images, run on the inputs that the form "halo" has fetched.

They are convolution, pooling, resampling, im2col and col2im.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules.halo.spatial import (
    block_grid,
    block_window,
    padding_of,
    per_dim,
    pool_window,
    resampling_factors,
)
from ..registry import Shards
from .halo import ON_FETCHED, FetchedInputs, crop_outputs, run_op_with

Parts = list[FetchedInputs]


def pad_borders(x: Tensor, parts: Parts, value: float) -> Tensor:
    """Pad the fetched inputs ``x`` with ``value`` where they reach past the logical tensor's ends.

    The op then runs without padding along the fetched dims.
    """
    pad = [0, 0] * x.ndim
    for part in parts:
        k = 2 * (x.ndim - 1 - part.dim)
        pad[k : k + 2] = part.low, part.high
    return F.pad(x, pad, value=value) if any(pad) else x


def _paddings(shard: Shards, x: Tensor, parts: Parts, count: int) -> list[int]:
    """Return the ``padding`` argument for the op on the fetched inputs ``x``.

    One number for each of the ``count`` last dims: 0 along those that were fetched, which
    ``pad_borders`` pads, and that of the call along the others.
    """
    fetched_dims = {part.dim for part in parts}
    first = x.ndim - count
    return [
        0 if first + k in fetched_dims else padding_of(shard.call, k) or 0 for k in range(count)
    ]


# -- convolution -----------------------------------------------------------------------------------


def _local_groups(shard: Shards, x: Tensor) -> dict[str, int]:
    """Return the ``groups`` argument of a convolution for this shard, as a dict of named arguments.

    A rank with a fraction of the channels has the same fraction of the groups.
    """
    groups, count = shard.get("groups", 1), shard.tensors[1].ndim - 2
    channels = shard.specs[0].shape[x.ndim - count - 1]
    return {} if groups == 1 else {"groups": groups * x.shape[-count - 1] // channels}


def _convolve(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    padding = _paddings(shard, x, parts, shard.tensors[1].ndim - 2)
    x = pad_borders(x, parts, 0)
    return run_op_with(shard, x, padding=padding, **_local_groups(shard, x))


def _convolve_transposed(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    count = shard.tensors[1].ndim - 2
    padding = _paddings(shard, x, parts, count)
    out = run_op_with(shard, x, padding=padding, **_local_groups(shard, x))
    for part in parts:
        spatial_dim = part.dim - (x.ndim - count)
        stride, pad_before = (
            per_dim(shard.get("stride", 1), spatial_dim, 1),
            padding_of(shard.call, spatial_dim) or 0,
        )
        # Input ``start`` writes to the logical outputs from start * stride - padding on.
        out = crop_outputs(out, part, part.first + pad_before - part.start * stride)
    return out


# -- pooling ---------------------------------------------------------------------------------------


def _average_pool(count: int) -> Callable[[Shards, Tensor, Parts], Tensor]:
    def run(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
        padding = _paddings(shard, x, parts, count)
        out = run_op_with(shard, pad_borders(x, parts, 0), padding=padding)
        if "divisor_override" in shard.call.params and shard.get("divisor_override"):
            return out
        for part in parts:
            out = _rescale_averages(shard, out, part, part.dim - (x.ndim - count))
        return out

    return run


def _rescale_averages(shard: Shards, out: Tensor, part: FetchedInputs, spatial_dim: int) -> Tensor:
    """Rescale averages of avg_pool to the divisor that torch has for the logical tensor.

    On fetched inputs torch counts the padding that ``pad_borders`` has added as elements, some of
    which it does not count on the logical tensor. ``spatial_dim`` is the index of the fetched dim
    among the pooled dims.
    """
    kernel, stride, pad_before, _ = pool_window(shard.call, spatial_dim)
    n, counts_padding = shard.specs[0].shape[part.dim], shard.get("count_include_pad", True)
    factors = []
    for place in range(part.first, part.first + part.count):
        start = place * stride - pad_before
        end = min(start + kernel, n + pad_before)
        divisor = end - start if counts_padding else min(end, n) - max(start, 0)
        factors.append(kernel / divisor)
    if all(factor == 1 for factor in factors):
        return out
    shape = [1] * out.ndim
    shape[part.dim] = -1
    return out * torch.tensor(factors, dtype=out.dtype, device=out.device).view(shape)


def _max_pool(count: int) -> Callable[[Shards, Tensor, Parts], Any]:
    def run(shard: Shards, x: Tensor, parts: Parts) -> Any:
        padding = _paddings(shard, x, parts, count)
        # Not 0: padding must never be the maximum.
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        bordered_x = pad_borders(x, parts, lowest)
        return _to_logical_indices(
            shard, run_op_with(shard, bordered_x, padding=padding), bordered_x, parts, count
        )

    return run


def _to_logical_indices(shard: Shards, result: Any, x: Tensor, parts: Parts, count: int) -> Any:
    """Convert the indices that max_pool returns from the fetched inputs to the logical image.

    ``result`` is that of the op on ``x``, the padded inputs: (values, flat indices in a
    plane), or only the values, which are returned as they are. ``count`` is the number of pooled
    dims.
    """
    if isinstance(result, Tensor):
        return result
    values, places = result
    plane, starts = list(x.shape[-count:]), [0] * count
    for part in parts:
        starts[part.dim - (x.ndim - count)] = part.start - part.low
    logical_index, logical_plane = torch.zeros_like(places), shard.specs[0].shape[-count:]
    for k in range(count):
        coordinate = places // math.prod(plane[k + 1 :]) % plane[k] + starts[k]
        logical_index = logical_index + coordinate * math.prod(logical_plane[k + 1 :])
    return values, logical_index


def _adaptive_pool(count: int) -> Callable[[Shards, Tensor, Parts], Any]:
    def run(shard: Shards, x: Tensor, parts: Parts) -> Any:
        size = list(shard.outs[0].shape[-count:])
        for part in parts:
            size[part.dim - (x.ndim - count)] = part.count
        result = run_op_with(shard, x, output_size=size)
        return _to_logical_indices(shard, result, x, parts, count)

    return run


# -- resampling, blocks ----------------------------------------------------------------------------


def _resample(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    in_shape, out_shape = shard.specs[0].shape, shard.outs[0].shape
    if shard.get("size") is None:  # the call gives scale factors
        out = run_op_with(shard, x)
    else:
        size = list(out_shape[2:])
        for part in parts:
            size[part.dim - 2] = x.shape[part.dim] * out_shape[part.dim] // in_shape[part.dim]
        out = run_op_with(shard, x, size=size)
    for part in parts:
        up, down = resampling_factors(in_shape[part.dim], out_shape[part.dim]) or (1, 1)
        out = crop_outputs(out, part, part.first - part.start * up // down)
    return out


def _im2col(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    (part,), width = parts, block_grid(shard.call)[1]
    out = run_op_with(shard, pad_borders(x, parts, 0), padding=[0, block_window(shard.call, 1)[1]])
    return out.narrow(-1, part.first - part.first // width * width, part.count)


def _col2im(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    (part,), width = parts, block_grid(shard.call)[1]
    (stride, pad_before, span), columns = block_window(shard.call, 0), block_window(shard.call, 1)
    rows, image = x.shape[-1] // width, shard.get("output_size")[1]
    if rows == 0:  # no block reaches these rows, and the fetch stays in the graph
        return x.new_zeros(shard.out_shape()) + x.sum()
    height = (rows - 1) * stride + span
    out = run_op_with(shard, x, output_size=[height, image], padding=[0, columns[1]])
    start = part.first - (part.start // width * stride - pad_before)
    end = start + part.count
    out = out[..., max(0, start) : min(height, end), :]
    return F.pad(out, (0, 0, max(0, -start), max(0, end - height)))


ON_FETCHED.update(
    {
        "col2im": _col2im, "im2col": _im2col,
        **{f"adaptive_{kind}_pool{k}d": _adaptive_pool(k)
           for kind in ("avg", "max") for k in (1, 2, 3)},
        **{f"avg_pool{k}d": _average_pool(k) for k in (1, 2, 3)},
        **{f"conv{k}d": _convolve for k in (1, 2, 3)},
        **{f"conv_transpose{k}d": _convolve_transposed for k in (1, 2, 3)},
        **{f"max_pool{k}d": _max_pool(k) for k in (1, 2, 3)},
        **{f"max_pool{k}d_with_indices": _max_pool(k) for k in (1, 2, 3)},
        **{f"upsample_nearest{k}d": _resample for k in (1, 2, 3)},
        **{f"_upsample_nearest_exact{k}d": _resample for k in (1, 2, 3)},
        "upsample_linear1d": _resample, "upsample_trilinear3d": _resample,
        **{f"upsample_{kind}2d": _resample for kind in ("bilinear", "bicubic")},
        **{f"_upsample_{k}2d_aa": _resample for k in ("bilinear", "bicubic", "lanczos")},
    }
)  # fmt: skip
