"""Ops on planes of pixels, on the run of a split dim that was fetched for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.planes import (
    block_rows,
    block_window,
    padding_at,
    per_dim,
    pool_window,
    scaled_by,
    scales_of,
)
from .forms import Shards
from .window import FINISH, Run, again, cropped

Runs = list[Run]


def bordered(x: Tensor, runs: Runs, value: float) -> Tensor:
    """``x`` with ``value`` where its runs look past the ends."""
    pad = [0, 0] * x.ndim
    for run in runs:
        k = 2 * (x.ndim - 1 - run.dim)
        pad[k : k + 2] = run.low, run.high
    return F.pad(x, pad, value=value) if any(pad) else x


def _paddings(shard: Shards, x: Tensor, runs: Runs, count: int) -> list[int]:
    """The op's padding along each plane dim, none where the runs have theirs."""
    own = {run.dim for run in runs}
    first = x.ndim - count
    return [0 if first + k in own else padding_at(shard.call, k) or 0 for k in range(count)]


# -- convolution -----------------------------------------------------------------------------------


def _local_groups(shard: Shards, x: Tensor) -> dict[str, int]:
    """A rank with part of the channels has as large a part of the groups."""
    groups, count = shard.get("groups", 1), shard.tensors[1].ndim - 2
    channels = shard.specs[0].shape[x.ndim - count - 1]
    return {} if groups == 1 else {"groups": groups * x.shape[-count - 1] // channels}


def _convolve(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    padding = _paddings(shard, x, runs, shard.tensors[1].ndim - 2)
    x = bordered(x, runs, 0)
    return again(shard, x, padding=padding, **_local_groups(shard, x))


def _convolve_transposed(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    count = shard.tensors[1].ndim - 2
    padding = _paddings(shard, x, runs, count)
    out = again(shard, x, padding=padding, **_local_groups(shard, x))
    for run in runs:
        at = run.dim - (x.ndim - count)
        stride, before = per_dim(shard.get("stride", 1), at, 1), padding_at(shard.call, at) or 0
        out = cropped(out, run, run.first + before - run.start * stride)
    return out


# -- pooling ---------------------------------------------------------------------------------------


def _averaged(count: int) -> Callable[[Shards, Tensor, Runs], Tensor]:
    def finish(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
        padding = _paddings(shard, x, runs, count)
        out = again(shard, bordered(x, runs, 0), padding=padding)
        if "divisor_override" in shard.call.params and shard.get("divisor_override"):
            return out
        for run in runs:
            out = _recounted(shard, out, run, run.dim - (x.ndim - count))
        return out

    return finish


def _recounted(shard: Shards, out: Tensor, run: Run, at: int) -> Tensor:
    """The border that was added counts as elements; torch leaves some of it out of the count."""
    kernel, stride, before, _ = pool_window(shard.call, at)
    n, counted = shard.specs[0].shape[run.dim], shard.get("count_include_pad", True)
    factors = []
    for place in range(run.first, run.first + run.count):
        start = place * stride - before
        end = min(start + kernel, n + before)
        inside = end - start if counted else min(end, n) - max(start, 0)
        factors.append(kernel / inside)
    if all(factor == 1 for factor in factors):
        return out
    shape = [1] * out.ndim
    shape[run.dim] = -1
    return out * torch.tensor(factors, dtype=out.dtype, device=out.device).view(shape)


def _largest(count: int) -> Callable[[Shards, Tensor, Runs], Any]:
    def finish(shard: Shards, x: Tensor, runs: Runs) -> Any:
        padding = _paddings(shard, x, runs, count)
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        bordered_x = bordered(x, runs, lowest)
        return _placed(shard, again(shard, bordered_x, padding=padding), bordered_x, runs, count)

    return finish


def _placed(shard: Shards, found: Any, x: Tensor, runs: Runs, count: int) -> Any:
    """Maxima with their places in the whole plane, from places in the run."""
    if isinstance(found, Tensor):
        return found
    values, places = found
    inside, starts = list(x.shape[-count:]), [0] * count
    for run in runs:
        starts[run.dim - (x.ndim - count)] = run.start - run.low
    moved, whole = torch.zeros_like(places), shard.specs[0].shape[-count:]
    for k in range(count):
        at = places // math.prod(inside[k + 1 :]) % inside[k] + starts[k]
        moved = moved + at * math.prod(whole[k + 1 :])
    return values, moved


def _adapted(count: int) -> Callable[[Shards, Tensor, Runs], Any]:
    def finish(shard: Shards, x: Tensor, runs: Runs) -> Any:
        size = list(shard.outs[0].shape[-count:])
        for run in runs:
            size[run.dim - (x.ndim - count)] = run.count
        found = again(shard, x, output_size=size)
        return _placed(shard, found, x, runs, count)

    return finish


# -- resampling, blocks ----------------------------------------------------------------------------


def _resample(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    logical, made = shard.specs[0].shape, shard.outs[0].shape
    if scales_of(shard.call):
        out = again(shard, x)
    else:
        size = list(made[2:])
        for run in runs:
            size[run.dim - 2] = x.shape[run.dim] * made[run.dim] // logical[run.dim]
        out = again(shard, x, size=size)
    for run in runs:
        more, less = scaled_by(logical[run.dim], made[run.dim]) or (1, 1)
        out = cropped(out, run, run.first - run.start * more // less)
    return out


def _to_blocks(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    (run,), width = runs, block_rows(shard.call)[1]
    out = again(shard, bordered(x, runs, 0), padding=[0, block_window(shard.call, 1)[1]])
    return out.narrow(-1, run.first - run.first // width * width, run.count)


def _from_blocks(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    (run,), width = runs, block_rows(shard.call)[1]
    (stride, before, span), columns = block_window(shard.call, 0), block_window(shard.call, 1)
    rows, image = x.shape[-1] // width, shard.get("output_size")[1]
    if rows == 0:  # no block reaches these rows, and the fetch stays in the graph
        return x.new_zeros(shard.out_shape()) + x.sum()
    height = (rows - 1) * stride + span
    out = again(shard, x, output_size=[height, image], padding=[0, columns[1]])
    start = run.first - (run.start // width * stride - before)
    end = start + run.count
    out = out[..., max(0, start) : min(height, end), :]
    return F.pad(out, (0, 0, max(0, -start), max(0, end - height)))


FINISH.update(
    {
        "col2im": _from_blocks, "im2col": _to_blocks,
        **{f"adaptive_{kind}_pool{k}d": _adapted(k) for kind in ("avg", "max") for k in (1, 2, 3)},
        **{f"avg_pool{k}d": _averaged(k) for k in (1, 2, 3)},
        **{f"conv{k}d": _convolve for k in (1, 2, 3)},
        **{f"conv_transpose{k}d": _convolve_transposed for k in (1, 2, 3)},
        **{f"max_pool{k}d": _largest(k) for k in (1, 2, 3)},
        **{f"max_pool{k}d_with_indices": _largest(k) for k in (1, 2, 3)},
        **{f"upsample_nearest{k}d": _resample for k in (1, 2, 3)},
        **{f"_upsample_nearest_exact{k}d": _resample for k in (1, 2, 3)},
        "upsample_linear1d": _resample, "upsample_trilinear3d": _resample,
        **{f"upsample_{kind}2d": _resample for kind in ("bilinear", "bicubic")},
        **{f"_upsample_{k}2d_aa": _resample for k in ("bilinear", "bicubic", "lanczos")},
    }
)  # fmt: skip
