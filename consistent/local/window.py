"""The form "window": a rank fetches the run of a split dim that its outputs look at, and runs the
op on it.

```
forward    rank 0   rank 1             rank 0   rank 1
           a b c    d e f     --->     a b c d  c d e f
backward   the same messages the other way; what comes back is added
           x y z+u  t+v w s   <---     x y z t  u v w s
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrored import comm

from ..rules.indexing import index_of
from ..rules.window import clipped, padding_at, pads_at, per_dim, reach, scales_of, shifts
from ..spec import Coordinate, Split
from .forms import Shards, form


class Run:
    """What a rank fetched along ``dim``: inputs from ``start``, and padding where the outputs
    look past the ends."""

    def __init__(self, dim: int, start: int, low: int, high: int, first: int, count: int) -> None:
        self.dim, self.start, self.low, self.high = dim, start, low, high
        self.first, self.count = first, count  # of the outputs


@form("window")
def window(shard: Shards) -> Tensor:
    """Fetch along each split dim that the op looks along, then the op."""
    x, runs = shard.tensors[0], []
    for d in dict.fromkeys(e.dim for e in shard.specs[0].sbp if isinstance(e, Split)):
        if reach(shard.call, d) is not None and _is_windowed(shard, d):
            x, run = _fetched(shard, x, d)
            runs.append(run)
    return _FINISH[shard.call.name](shard, x, runs)


def _is_windowed(shard: Shards, d: int) -> bool:
    """Whether this form serves the axes that split ``d``."""
    return any(shard.specs[0].sbp[a] == Split(d) for a in shard.axes)


# -- fetching --------------------------------------------------------------------------------------


def _fetched(shard: Shards, x: Tensor, d: int) -> tuple[Tensor, Run]:
    found, n = reach(shard.call, d), shard.specs[0].shape[d]
    assert found is not None
    at = shard.here or (0,) * shard.placement.ndim
    wanted, own = {}, {}
    for c in _group(shard, d, at):
        starts, sizes = shard.specs[0].box(c)
        firsts, counts = shard.outs[0].box(c)
        ranges = found.ranges(firsts[found.place], firsts[found.place] + counts[found.place])
        wanted[c], own[c] = ranges, (starts[d], starts[d] + sizes[d])
    firsts, counts = shard.outs[0].box(at)
    mine = clipped(wanted[at], n)
    a, b = (wanted[at][0][0], wanted[at][-1][1]) if wanted[at] else (0, 0)
    low, high = min(max(-a, 0), b - a), min(max(b - n, 0), b - a)
    start = mine[0][0] if mine else max(0, min(a, n))
    run = Run(d, start, max(low, 0), max(high, 0), firsts[found.place], counts[found.place])
    messages = _Messages(shard, d, at, {c: clipped(r, n) for c, r in wanted.items()}, own)
    return _Fetch.apply(x, messages), run


def _group(shard: Shards, d: int, at: Coordinate) -> list[Coordinate]:
    """Coordinates of the ranks that share dim ``d``, in the order of its pieces."""
    group = [at]
    for axis, entry in enumerate(shard.specs[0].sbp):
        if entry == Split(d):
            n = shard.placement.shape[axis]
            group = [(*c[:axis], k, *c[axis + 1 :]) for c in group for k in range(n)]
    return group


class _Messages:
    """Who sends which part of its shard to whom: (rank, start in the shard, size) and (rank,
    size), in order."""

    def __init__(
        self,
        shard: Shards,
        dim: int,
        at: Coordinate,
        wanted: dict[Coordinate, list[tuple[int, int]]],
        own: dict[Coordinate, tuple[int, int]],
    ) -> None:
        def overlaps(to: Coordinate, source: Coordinate) -> list[tuple[int, int]]:
            lo, hi = own[source]
            cut = [(max(a, lo), min(b, hi)) for a, b in wanted[to]]
            return [(a - lo, b - a) for a, b in cut if a < b]

        rank_at = shard.placement.rank_at
        self.dim, self.ranks = dim, tuple(rank_at(c) for c in own)
        self.sends = [(rank_at(c), a, size) for c in own for a, size in overlaps(c, at)]
        self.receives = []
        for a, b in wanted[at]:
            for c, (lo, hi) in own.items():
                size = min(b, hi) - max(a, lo)
                if size > 0:
                    self.receives.append((rank_at(c), size))
        every = [(to, source) for to in own for source in own if to != source]
        self.local = not any(overlaps(to, source) for to, source in every)


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _fetch(x: Tensor, m: _Messages) -> Tensor:
    if x.is_meta:
        return x.new_empty(_resized(x, m.dim, sum(size for _, size in m.receives)))
    sends = [(rank, x.narrow(m.dim, a, size).contiguous()) for rank, a, size in m.sends]
    if m.local:
        pieces = [piece for _, piece in sends]
    else:
        shapes = [(rank, _resized(x, m.dim, size), x.dtype) for rank, size in m.receives]
        pieces = comm.current().exchange(sends, shapes, m.ranks, x.device)
    return torch.cat(pieces, m.dim) if pieces else x.narrow(m.dim, 0, 0).clone()


def _give_back(x: Tensor, m: _Messages, n: int) -> Tensor:
    out = x.new_zeros(_resized(x, m.dim, n))
    if x.is_meta:
        return out
    parts = x.split([size for _, size in m.receives], m.dim) if m.receives else ()
    if m.local:
        pieces = list(parts)
    else:
        sends = [(r, p.contiguous()) for (r, _), p in zip(m.receives, parts, strict=True)]
        shapes = [(rank, _resized(x, m.dim, size), x.dtype) for rank, _, size in m.sends]
        pieces = comm.current().exchange(sends, shapes, m.ranks, x.device)
    for (_, a, size), piece in zip(m.sends, pieces, strict=True):
        out.narrow(m.dim, a, size).add_(piece)
    return out


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _Messages) -> Tensor:
        ctx.messages, ctx.n = messages, x.shape[messages.dim]
        return _fetch(x, messages)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GiveBack.apply(grad, ctx.messages, ctx.n), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _Fetch.apply(tangent, ctx.messages)


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _Messages, n: int) -> Tensor:
        ctx.messages, ctx.n = messages, n
        return _give_back(x, messages, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Fetch.apply(grad, ctx.messages), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _GiveBack.apply(tangent, ctx.messages, ctx.n)


# -- the op on what was fetched --------------------------------------------------------------------


def _again(shard: Shards, x: Tensor, **changed: Any) -> Tensor:
    """The op on ``x`` with some of its arguments changed."""
    args, kwargs = [x, *shard.args[1:]], dict(shard.kwargs)
    kwargs.pop("input", None)
    kwargs.pop("self", None)
    for name, value in changed.items():
        position = shard.call.params.index(name)
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return shard.run(*args, **kwargs)


def _bordered(x: Tensor, runs: list[Run], value: float) -> Tensor:
    """``x`` with ``value`` where its runs look past the ends."""
    pad = [0, 0] * x.ndim
    for run in runs:
        k = 2 * (x.ndim - 1 - run.dim)
        pad[k : k + 2] = run.low, run.high
    return F.pad(x, pad, value=value) if any(pad) else x


def _cropped(x: Tensor, run: Run, start: int) -> Tensor:
    return x.narrow(run.dim, start, run.count)


def _paddings(shard: Shards, x: Tensor, runs: list[Run], count: int) -> list[int]:
    """The op's padding along each plane dim, none where the runs have theirs."""
    own = {run.dim for run in runs}
    first = x.ndim - count
    return [0 if first + k in own else padding_at(shard.call, k) or 0 for k in range(count)]


def _local_groups(shard: Shards, x: Tensor) -> dict[str, int]:
    """A rank with part of the channels has as large a part of the groups."""
    groups, count = shard.get("groups", 1), shard.tensors[1].ndim - 2
    channels = shard.specs[0].shape[x.ndim - count - 1]
    return {} if groups == 1 else {"groups": groups * x.shape[-count - 1] // channels}


def _convolve(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    padding = _paddings(shard, x, runs, shard.tensors[1].ndim - 2)
    x = _bordered(x, runs, 0)
    return _again(shard, x, padding=padding, **_local_groups(shard, x))


def _convolve_transposed(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    count = shard.tensors[1].ndim - 2
    padding = _paddings(shard, x, runs, count)
    out = _again(shard, x, padding=padding, **_local_groups(shard, x))
    for run in runs:
        at = run.dim - (x.ndim - count)
        stride, before = per_dim(shard.get("stride", 1), at, 1), padding_at(shard.call, at) or 0
        out = _cropped(out, run, run.first + before - run.start * stride)
    return out


def _pool(count: int, value: float) -> Callable[[Shards, Tensor, list[Run]], Tensor]:
    def finish(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
        return _again(shard, _bordered(x, runs, value), padding=_paddings(shard, x, runs, count))

    return finish


def _resample(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    count = len(shard.specs[0].shape) - 2
    factors = {
        run.dim: shard.outs[0].shape[run.dim] // shard.specs[0].shape[run.dim] for run in runs
    }
    if scales_of(shard.call):
        out = _again(shard, x)
    else:
        size = list(shard.get("size"))
        for d, factor in factors.items():
            size[d - (x.ndim - count)] = x.shape[d] * factor
        out = _again(shard, x, size=size)
    for run in runs:
        out = _cropped(out, run, run.first - run.start * factors[run.dim])
    return out


def _pad(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    own = {run.dim: [run.low, run.high] for run in runs}
    dims = reversed(range(x.ndim))
    return _again(shard, x, pad=[n for d in dims for n in own.get(d, pads_at(shard.call, d))])


def _roll(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    left = {d: by for d, by in shifts(shard.call).items() if d not in {run.dim for run in runs}}
    return x.roll(tuple(left.values()), tuple(left)) if left else x


def _slice(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
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


def _as_it_is(shard: Shards, x: Tensor, runs: list[Run]) -> Tensor:
    return _again(shard, x)


_FINISH: dict[str, Callable[[Shards, Tensor, list[Run]], Tensor]] = {
    "avg_pool1d": _pool(1, 0), "avg_pool2d": _pool(2, 0), "avg_pool3d": _pool(3, 0),
    "constant_pad_nd": _pad, "conv1d": _convolve, "conv2d": _convolve, "conv3d": _convolve,
    "conv_transpose1d": _convolve_transposed, "conv_transpose2d": _convolve_transposed,
    "conv_transpose3d": _convolve_transposed, "diff": _as_it_is, "fft_fftshift": _roll,
    "fft_ifftshift": _roll, "flip": _as_it_is,
    "getitem": _slice, "max_pool1d": _pool(1, -math.inf), "max_pool2d": _pool(2, -math.inf),
    "max_pool3d": _pool(3, -math.inf), "narrow": _slice, "pad": _pad, "roll": _roll,
    "slice": _slice, "unfold": _as_it_is, "upsample_bilinear2d": _resample,
    "upsample_linear1d": _resample, "upsample_nearest1d": _resample,
    "upsample_nearest2d": _resample, "upsample_nearest3d": _resample,
    "upsample_trilinear3d": _resample,
}  # fmt: skip
