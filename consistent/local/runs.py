"""Ops that take elements from elsewhere along a dim, on the runs that were fetched for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..rules.indexing import index_of
from ..rules.runs import mirrored, pad_mode, pads_at, repeats, shifts
from ..rules.view import groups
from .forms import Shards
from .planes import Runs
from .window import FINISH, Run, again, cropped


def _as_it_is(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    return again(shard, x)


def _pad(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    mode = pad_mode(shard.call)
    for run in runs:
        if mode in ("reflect", "replicate"):
            x = _reflected(shard, x, run, mode)
    # A constant border is the op's own; of the others the runs have it now.
    constant = mode == "constant"
    own = {run.dim: (run.low, run.high) if constant else (0, 0) for run in runs}
    pad = [n for d in reversed(range(x.ndim)) for n in own.get(d, pads_at(shard.call, d))]
    if constant:
        return again(shard, x, pad=pad)
    return again(shard, x, pad=pad[: len(shard.get("pad"))]) if any(pad) else x


def _reflected(shard: Shards, x: Tensor, run: Run, mode: str) -> Tensor:
    n, before = shard.specs[0].shape[run.dim], pads_at(shard.call, run.dim)[0]
    places = range(run.first - before, run.first - before + run.count)
    taken = [mirrored(mode, place, n) - run.start for place in places]
    return x.index_select(run.dim, torch.tensor(taken, device=x.device))


def _repeat(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    times = list(repeats(shard.call))
    for run in runs:
        times[run.dim - x.ndim] = 1
    return x.repeat(times)


def _repeat_in_place(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    (run,) = runs
    return cropped(again(shard, x), run, run.first - run.start * shard.get("repeats"))


def _roll(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    left = {d: by for d, by in shifts(shard.call).items() if d not in {run.dim for run in runs}}
    return x.roll(tuple(left.values()), tuple(left)) if left else x


def _slice(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    index, own = index_of(shard.call), {run.dim for run in runs}
    entries: list[Any] = []
    for item in index.items:
        if item.kind == "new":
            entries.append(None)
        elif item.kind == "pick":
            entries.append(item.start)
        elif item.dim in own:
            entries.append(slice(None, None, item.step))
        elif item.kind == "all":
            entries.append(slice(None))
        else:
            end = item.start + (item.count - 1) * item.step + 1 if item.count else item.start
            entries.append(slice(item.start, end, item.step))
    return x[tuple(entries)]


def _regroup(shard: Shards, x: Tensor, runs: Runs) -> Tensor:
    """The elements of this rank's pieces, cut out of the whole indices that hold them."""
    source, target = shard.specs[0].shape, shard.outs[0].shape
    found = {run.dim: run for run in runs}
    for ins, outs in reversed(groups(source, target)):
        run = next((found[d] for d in ins if d in found), None)
        if run is None:
            continue
        place = next(o for o in outs if target[o] != 1)
        span = math.prod(source[run.dim + 1 : ins[-1] + 1])
        out_span = math.prod(target[place + 1 : outs[-1] + 1])
        x = x.flatten(ins[0], ins[-1])
        x = x.narrow(ins[0], run.first * out_span - run.start * span, run.count * out_span)
    return x.reshape(shard.out_shape())


FINISH.update(
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
