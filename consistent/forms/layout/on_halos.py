"""Ops that take elements from other positions along a dim, such as roll, on fetched inputs.

The form "halo" fetches the inputs: for slices, pads, rolls, repeats and regrouped dims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...rules.layout.halos import mirrored, pad_mode, pads_at, repeats, shifts
from ...rules.layout.subscript import subscript_of
from ...rules.layout.view import groups
from ..halo.halo import ON_FETCHED, Fetched, again, cropped
from ..halo.spatial import Parts
from ..registry import Shards


def _as_it_is(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    return again(shard, x)


def _pad(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    mode = pad_mode(shard.call)
    for part in parts:
        if mode in ("reflect", "replicate"):
            x = _reflected(shard, x, part, mode)
    # The op itself adds a constant border. Other borders are already in the fetched parts.
    constant = mode == "constant"
    own = {part.dim: (part.low, part.high) if constant else (0, 0) for part in parts}
    pad = [n for d in reversed(range(x.ndim)) for n in own.get(d, pads_at(shard.call, d))]
    if constant:
        return again(shard, x, pad=pad)
    return again(shard, x, pad=pad[: len(shard.get("pad"))]) if any(pad) else x


def _reflected(shard: Shards, x: Tensor, part: Fetched, mode: str) -> Tensor:
    """Select the elements of a reflecting or replicating pad along a fetched dim."""
    n, before = shard.specs[0].shape[part.dim], pads_at(shard.call, part.dim)[0]
    places = range(part.first - before, part.first - before + part.count)
    taken = [mirrored(mode, place, n) - part.start for place in places]
    return x.index_select(part.dim, torch.tensor(taken, device=x.device))


def _repeat(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    times = list(repeats(shard.call))
    for part in parts:
        times[part.dim - x.ndim] = 1
    return x.repeat(times)


def _repeat_in_place(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    (part,) = parts
    return cropped(again(shard, x), part, part.first - part.start * shard.get("repeats"))


def _roll(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    # The fetched ranges are already rolled along split dims.
    left = {d: by for d, by in shifts(shard.call).items() if d not in {part.dim for part in parts}}
    return x.roll(tuple(left.values()), tuple(left)) if left else x


def _slice(shard: Shards, x: Tensor, parts: Parts) -> Tensor:
    index, own = subscript_of(shard.call), {part.dim for part in parts}
    entries: list[Any] = []
    for item in index.items:
        if item.kind == "new":
            entries.append(None)
        elif item.kind == "int":
            entries.append(item.start)
        elif item.dim in own:
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
    found = {part.dim: part for part in parts}
    for ins, outs in reversed(groups(source, target)):
        part = next((found[d] for d in ins if d in found), None)
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
        "constant_pad_nd": _pad, "diff": _as_it_is, "fft_fftshift": _roll,
        "fft_ifftshift": _roll, "flip": _as_it_is, "fliplr": _as_it_is, "flipud": _as_it_is,
        "getitem": _slice, "narrow": _slice, "narrow_copy": _slice, "pad": _pad, "repeat": _repeat,
        "repeat_interleave": _repeat_in_place, "roll": _roll, "rot90": _as_it_is,
        "slice": _slice, "tile": _repeat,
        "unfold": _as_it_is,
        **dict.fromkeys("_unsafe_view flatten ravel reshape unflatten view".split(), _regroup),
    }
)  # fmt: skip
