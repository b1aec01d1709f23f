"""Form "halo" of ops such as convolution, whose outputs read neighbouring shards along a split dim.

It fetches the inputs that this rank's outputs read, and runs the op on them. The ops on the fetched
inputs are in ``spatial.py`` and ``layout/on_halos.py``.

```
forward    rank 0   rank 1             rank 0   rank 1
           a b c    d e f     --->     a b c d  c d e f
backward   the same messages the other way; what comes back is added
           x y z+u  t+v w s   <---     x y z t  u v w s
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import resized
from mirrored.transports.default import current

from ...rules.halo.halo import FORM, Ranges, clipped, halo_of
from ...spec import Coordinate, Split, TensorSpec
from ..registry import Shards, form


class Fetched:
    """Which inputs a rank has fetched along ``dim``, and which outputs it computes from them.

    Args:
        dim: dim of the input.
        start: index in the logical tensor of the first fetched input.
        low: number of padding elements that the outputs read before the start of the tensor.
        high: the same past the end of the tensor.
        first: index of the first of this rank's outputs in the logical output.
        count: number of these outputs.
    """

    def __init__(self, dim: int, start: int, low: int, high: int, first: int, count: int) -> None:
        self.dim, self.start, self.low, self.high = dim, start, low, high
        self.first, self.count = first, count  # index range of this rank's outputs


@form(FORM)
def halo(shard: Shards) -> Tensor:
    """Fetch along each split dim where outputs read neighbouring shards, then run the op.

    For a convolution with a kernel of 3 and stride 1 this is one element on each side of the shard.
    """
    x, parts = shard.tensors[0], []
    for d in dict.fromkeys(e.dim for e in shard.specs[0].sbp if isinstance(e, Split)):
        if halo_of(shard.call, d) is not None and _is_served(shard, d):
            x, part = _fetched(shard, x, d)
            parts.append(part)
    return ON_FETCHED[shard.call.name](shard, x, parts)


# Op name -> function that runs the op on the fetched inputs.
ON_FETCHED: dict[str, Callable[[Shards, Tensor, list[Fetched]], Any]] = {}


def again(shard: Shards, x: Tensor, **changed: Any) -> Any:
    """Run the op on ``x`` in place of its first operand, and with the arguments ``changed``.

    ``again(shard, x, padding=0)`` calls the op with its own arguments but for input and padding.
    """
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


def cropped(x: Tensor, part: Fetched, start: int) -> Tensor:
    """Return the items of ``x`` along the fetched dim that are this rank's outputs.

    ``x`` is the op's result on the fetched inputs, in which the rank's own outputs begin at index
    ``start``.
    """
    return x.narrow(part.dim, start, part.count)


def _is_served(shard: Shards, d: int) -> bool:
    """Return whether the form has to fetch along dim ``d``: whether one of its axes splits it."""
    return any(shard.specs[0].sbp[a] == Split(d) for a in shard.axes)


# -- fetching --------------------------------------------------------------------------------------


def _fetched(shard: Shards, x: Tensor, d: int) -> tuple[Tensor, Fetched]:
    """Fetch the inputs that this rank's outputs read along ``d``; return (inputs, description)."""
    found, n = halo_of(shard.call, d), shard.specs[0].shape[d]
    assert found is not None
    at, place = place_of(shard), found.place

    def wanted(c: Coordinate) -> Ranges:
        firsts, counts = shard.outs[0].region(c)
        return found.ranges(firsts[place], firsts[place] + counts[place])

    firsts, counts = shard.outs[0].region(at)
    mine, whole = clipped(wanted(at), n), wanted(at)
    a, b = (whole[0][0], whole[-1][1]) if whole else (0, 0)
    low, high = min(max(-a, 0), b - a), min(max(b - n, 0), b - a)
    start = mine[0][0] if mine else max(0, min(a, n))
    part = Fetched(d, start, max(low, 0), max(high, 0), firsts[place], counts[place])
    return fetch(shard, x, shard.specs[0], d, wanted), part


def place_of(shard: Shards) -> Coordinate:
    """Return this rank's coordinate in the placement.

    For a rank outside the placement it is the coordinate of the first rank, which has the largest
    shards.
    """
    return shard.coordinate or (0,) * shard.placement.ndim


def fetch(
    shard: Shards, x: Tensor, spec: TensorSpec, d: int, wanted: Callable[[Coordinate], Ranges]
) -> Tensor:
    """Fetch ranges of the logical tensor along dim ``d``, concatenated in order; differentiable.

    If no axis splits the dim, this is a slice of the shard without communication.

    Args:
        shard: the call.
        x: this rank's shard of the tensor.
        spec: spec of the tensor.
        d: the dim to fetch along.
        wanted: maps a rank's coordinate to the (start, end) ranges it wants. Parts outside the
            tensor are left out.
    """
    at, asked, own = place_of(shard), {}, {}
    for c in _group(spec, d, at):
        starts, sizes = spec.region(c)
        asked[c], own[c] = clipped(wanted(c), spec.shape[d]), (starts[d], starts[d] + sizes[d])
    return _Fetch.apply(x, _Messages(shard, d, at, asked, own))


def _group(spec: TensorSpec, d: int, at: Coordinate) -> list[Coordinate]:
    """Return the coordinates of the ranks that hold the pieces of dim ``d``, in their order.

    ``at`` is the coordinate of this rank, one of them.
    """
    group = [at]
    for axis, entry in enumerate(spec.sbp):
        if entry == Split(d):
            n = spec.placement.shape[axis]
            group = [(*c[:axis], k, *c[axis + 1 :]) for c in group for k in range(n)]
    return group


class _Messages:
    """The messages that this rank sends and receives in one ``fetch``, in order.

    ``sends`` are (rank, start in the shard, size), ``receives`` are (rank, size). They are computed
    from the ranges that each rank holds (``own``) and wants.
    """

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
        # True only if no rank of the group needs anything from another. All ranks must agree on it,
        # because a rank that exchanges would wait for one that does not.
        every = [(to, source) for to in own for source in own if to != source]
        self.local = not any(overlaps(to, source) for to, source in every)


def _fetch(x: Tensor, m: _Messages) -> Tensor:
    """Exchange the messages ``m``, and return the received pieces, concatenated."""
    if x.is_meta:
        return x.new_empty(resized(x.shape, m.dim, sum(size for _, size in m.receives)))
    sends = [(rank, x.narrow(m.dim, a, size).contiguous()) for rank, a, size in m.sends]
    if m.local:
        pieces = [piece for _, piece in sends]
    else:
        shapes = [(rank, resized(x.shape, m.dim, size), x.dtype) for rank, size in m.receives]
        pieces = current().exchange(sends, shapes, m.ranks, x.device)
    return torch.cat(pieces, m.dim) if pieces else x.narrow(m.dim, 0, 0).clone()


def _give_back(x: Tensor, m: _Messages, n: int) -> Tensor:
    """Return the gradient of the shard from ``x``, the gradient of the result of ``_fetch``.

    The messages ``m`` go the other way. ``n`` is the number of items of the shard.
    """
    # One element may have been sent to several ranks: their gradients add up.
    out = x.new_zeros(resized(x.shape, m.dim, n))
    if x.is_meta:
        return out
    parts = x.split([size for _, size in m.receives], m.dim) if m.receives else ()
    if m.local:
        pieces = list(parts)
    else:
        sends = [(r, p.contiguous()) for (r, _), p in zip(m.receives, parts, strict=True)]
        shapes = [(rank, resized(x.shape, m.dim, size), x.dtype) for rank, _, size in m.sends]
        pieces = current().exchange(sends, shapes, m.ranks, x.device)
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
