"""Ops that take elements from other positions along a dim, such as roll, on fetched inputs.

The form "halo" fetches the inputs: for slices, pads, rolls, repeats and regrouped dims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...rules.layout.halos import (
    pad_mode,
    pad_source_index,
    pads_of_dim,
    repeat_counts,
    roll_shifts,
)
from ...rules.layout.subscript import subscript_of
from ...rules.layout.view import dim_groups
from ..halo.halo import ON_FETCHED, FetchedInputs, crop_outputs, run_op_with
from ..halo.spatial import Parts
from ..registry import Shards


def _run_op(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    return run_op_with(shard, x)


def _pad(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    mode = pad_mode(shard.call)
    for part in parts:
        if mode in ("reflect", "replicate"):
            x = _select_reflected(shard, x, part, mode)
    # The op itself adds a constant border. Other borders are already in the fetched parts.
    constant = mode == "constant"
    fetched_pads = {part.dim: (part.low, part.high) if constant else (0, 0) for part in parts}
    pad = [
        n for d in reversed(range(x.ndim)) for n in fetched_pads.get(d, pads_of_dim(shard.call, d))
    ]
    if constant:
        return run_op_with(shard, x, pad=pad)
    return run_op_with(shard, x, pad=pad[: len(shard.get("pad"))]) if any(pad) else x


def _select_reflected(shard: Shards, x: Tensor, part: FetchedInputs, mode: str) -> Tensor:
    """Select the elements of a reflecting or replicating pad along a fetched dim."""
    n, pad_before = shard.specs[0].shape[part.dim], pads_of_dim(shard.call, part.dim)[0]
    places = range(part.first - pad_before, part.first - pad_before + part.count)
    indices = [pad_source_index(mode, place, n) - part.start for place in places]
    return x.index_select(part.dim, torch.tensor(indices, device=x.device))


def _repeat(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    times = list(repeat_counts(shard.call))
    for part in parts:
        times[part.dim - x.ndim] = 1
    return x.repeat(times)


def _repeat_interleave(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    (part,) = parts
    return crop_outputs(run_op_with(shard, x), part, part.first - part.start * shard.get("repeats"))


def _roll(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    # The fetched ranges are already rolled along split dims.
    other_shifts = {
        d: shift
        for d, shift in roll_shifts(shard.call).items()
        if d not in {part.dim for part in parts}
    }
    return x.roll(tuple(other_shifts.values()), tuple(other_shifts)) if other_shifts else x


def _slice(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    index, fetched_dims = subscript_of(shard.call), {part.dim for part in parts}
    entries: list[Any] = []
    for item in index.items:
        if item.kind == "new":
            entries.append(None)
        elif item.kind == "int":
            entries.append(item.start)
        elif item.dim in fetched_dims:
            entries.append(slice(None, None, item.step))
        elif item.kind == "all":
            entries.append(slice(None))
        else:
            end = item.start + (item.count - 1) * item.step + 1 if item.count else item.start
            entries.append(slice(item.start, end, item.step))
    return x[tuple(entries)]


def _regroup(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    """Run a view or reshape on fetched inputs.

    The fetched inputs are whole items of the split dim, such as rows. This rank's elements are cut
    out of them and get the shape of its output.
    """
    source, target = shard.specs[0].shape, shard.outs[0].shape
    part_of_dim = {part.dim: part for part in parts}
    for ins, outs in reversed(dim_groups(source, target)):
        part = next((part_of_dim[d] for d in ins if d in part_of_dim), None)
        if part is None:
            continue
        place = next(o for o in outs if target[o] != 1)
        span = math.prod(source[part.dim + 1 : ins[-1] + 1])
        out_span = math.prod(target[place + 1 : outs[-1] + 1])
        x = x.flatten(ins[0], ins[-1])
        x = x.narrow(ins[0], part.first * out_span - part.start * span, part.count * out_span)
    return x.reshape(shard.out_shape())


ON_FETCHED.update(
    {
        "constant_pad_nd": _pad, "diff": _run_op, "fft_fftshift": _roll,
        "fft_ifftshift": _roll, "flip": _run_op, "fliplr": _run_op, "flipud": _run_op,
        "getitem": _slice, "narrow": _slice, "narrow_copy": _slice, "pad": _pad, "repeat": _repeat,
        "repeat_interleave": _repeat_interleave, "roll": _roll, "rot90": _run_op,
        "slice": _slice, "tile": _repeat,
        "unfold": _run_op,
        **dict.fromkeys("_unsafe_view flatten ravel reshape unflatten view".split(), _regroup),
    }
)  # fmt: skip
