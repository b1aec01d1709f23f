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

from mirrored.comm import resize_dim
from mirrored.transports.default import current

from ...rules.halo.halo import FORM, Ranges, clip_ranges, halo_of
from ...spec import Coordinate, Split, TensorSpec
from ..registry import Shards, form


class FetchedInputs:
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
        if halo_of(shard.call, d) is not None and _has_to_fetch(shard, d):
            x, part = _fetch_inputs(shard, x, d)
            parts.append(part)
    return ON_FETCHED[shard.call.name](shard, x, parts)


# Op name -> function that runs the op on the fetched inputs.
ON_FETCHED: dict[str, Callable[[Shards, Tensor, list[FetchedInputs]], Any]] = {}


def run_op_with(shard: Shards, x: Tensor, **changed: Any) -> Any:
    """Run the op on ``x`` in place of its first operand, and with the arguments ``changed``.

    ``run_op_with(shard, x, padding=0)`` calls the op with its own other arguments.
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


def crop_outputs(x: Tensor, part: FetchedInputs, start: int) -> Tensor:
    """Return the items of ``x`` along the fetched dim that are this rank's outputs.

    ``x`` is the op's result on the fetched inputs, in which the rank's own outputs begin at index
    ``start``.
    """
    return x.narrow(part.dim, start, part.count)


def _has_to_fetch(shard: Shards, d: int) -> bool:
    """Return whether the form has to fetch along dim ``d``: whether one of its axes splits it."""
    return any(shard.specs[0].sbp[a] == Split(d) for a in shard.axes)


# -- fetching --------------------------------------------------------------------------------------


def _fetch_inputs(shard: Shards, x: Tensor, d: int) -> tuple[Tensor, FetchedInputs]:
    """Fetch the inputs that this rank's outputs read along ``d``; return (inputs, description)."""
    op_halo, n = halo_of(shard.call, d), shard.specs[0].shape[d]
    assert op_halo is not None
    coordinate, place = own_coordinate(shard), op_halo.out_dim

    def ranges_of(c: Coordinate) -> Ranges:
        firsts, counts = shard.outs[0].region(c)
        return op_halo.ranges(firsts[place], firsts[place] + counts[place])

    firsts, counts = shard.outs[0].region(coordinate)
    clipped_ranges, ranges = clip_ranges(ranges_of(coordinate), n), ranges_of(coordinate)
    a, b = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
    low, high = min(max(-a, 0), b - a), min(max(b - n, 0), b - a)
    start = clipped_ranges[0][0] if clipped_ranges else max(0, min(a, n))
    part = FetchedInputs(d, start, max(low, 0), max(high, 0), firsts[place], counts[place])
    return fetch_ranges(shard, x, shard.specs[0], d, ranges_of), part


def own_coordinate(shard: Shards) -> Coordinate:
    """Return this rank's coordinate in the placement.

    For a rank outside the placement it is the coordinate of the first rank, which has the largest
    shards.
    """
    return shard.coordinate or (0,) * shard.placement.ndim


def fetch_ranges(
    shard: Shards, x: Tensor, spec: TensorSpec, dim: int, ranges_of: Callable[[Coordinate], Ranges]
) -> Tensor:
    """Fetch ranges of the logical tensor along ``dim``, concatenated in order; differentiable.

    If no axis splits the dim, this is a slice of the shard without communication.

    Args:
        shard: the call.
        x: this rank's shard of the tensor.
        spec: spec of the tensor.
        dim: the dim to fetch along.
        ranges_of: maps a rank's coordinate to the (start, end) ranges it wants. Parts outside the
            tensor are left out.
    """
    coordinate, wanted, held = own_coordinate(shard), {}, {}
    for c in _group_coordinates(spec, dim, coordinate):
        starts, sizes = spec.region(c)
        wanted[c], held[c] = (
            clip_ranges(ranges_of(c), spec.shape[dim]),
            (starts[dim], starts[dim] + sizes[dim]),
        )
    return _FetchRanges.apply(x, _Messages(shard, dim, coordinate, wanted, held))


def _group_coordinates(spec: TensorSpec, d: int, coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates of the ranks that hold the pieces of dim ``d``, in their order.

    ``coordinate`` is that of this rank, one of them.
    """
    group = [coordinate]
    for axis, entry in enumerate(spec.sbp):
        if entry == Split(d):
            n = spec.placement.shape[axis]
            group = [(*c[:axis], k, *c[axis + 1 :]) for c in group for k in range(n)]
    return group


class _Messages:
    """The messages that this rank sends and receives in one ``fetch_ranges``, in order.

    ``sends`` are (rank, start in the shard, size), ``receives`` are (rank, size). They are computed
    from the ranges that each rank holds (``held``) and wants.
    """

    def __init__(
        self,
        shard: Shards,
        dim: int,
        coordinate: Coordinate,
        wanted: dict[Coordinate, list[tuple[int, int]]],
        held: dict[Coordinate, tuple[int, int]],
    ) -> None:
        def overlaps(target: Coordinate, source: Coordinate) -> list[tuple[int, int]]:
            lo, hi = held[source]
            ranges = [(max(a, lo), min(b, hi)) for a, b in wanted[target]]
            return [(a - lo, b - a) for a, b in ranges if a < b]

        rank_at = shard.placement.rank_at
        self.dim, self.ranks = dim, tuple(rank_at(c) for c in held)
        self.sends = [(rank_at(c), a, size) for c in held for a, size in overlaps(c, coordinate)]
        self.receives = []
        for a, b in wanted[coordinate]:
            for c, (lo, hi) in held.items():
                size = min(b, hi) - max(a, lo)
                if size > 0:
                    self.receives.append((rank_at(c), size))
        # True only if no rank of the group needs anything from another. All ranks must agree on it,
        # because a rank that exchanges would wait for one that does not.
        pairs = [(target, source) for target in held for source in held if target != source]
        self.local = not any(overlaps(target, source) for target, source in pairs)


def _exchange_messages(x: Tensor, messages: _Messages) -> Tensor:
    """Exchange ``messages``, and return the received pieces, concatenated."""
    if x.is_meta:
        return x.new_empty(
            resize_dim(x.shape, messages.dim, sum(size for _, size in messages.receives))
        )
    sends = [
        (rank, x.narrow(messages.dim, a, size).contiguous()) for rank, a, size in messages.sends
    ]
    if messages.local:
        pieces = [piece for _, piece in sends]
    else:
        shapes = [
            (rank, resize_dim(x.shape, messages.dim, size), x.dtype)
            for rank, size in messages.receives
        ]
        pieces = current().exchange(sends, shapes, messages.ranks, x.device)
    return torch.cat(pieces, messages.dim) if pieces else x.narrow(messages.dim, 0, 0).clone()


def _return_grads(x: Tensor, messages: _Messages, n: int) -> Tensor:
    """Return the gradient of the shard from ``x``, that of what ``_exchange_messages`` returned.

    The ``messages`` go the other way. ``n`` is the number of items of the shard.
    """
    # One element may have been sent to several ranks: their gradients add up.
    out = x.new_zeros(resize_dim(x.shape, messages.dim, n))
    if x.is_meta:
        return out
    parts = (
        x.split([size for _, size in messages.receives], messages.dim) if messages.receives else ()
    )
    if messages.local:
        pieces = list(parts)
    else:
        sends = [(r, p.contiguous()) for (r, _), p in zip(messages.receives, parts, strict=True)]
        shapes = [
            (rank, resize_dim(x.shape, messages.dim, size), x.dtype)
            for rank, _, size in messages.sends
        ]
        pieces = current().exchange(sends, shapes, messages.ranks, x.device)
    for (_, a, size), piece in zip(messages.sends, pieces, strict=True):
        out.narrow(messages.dim, a, size).add_(piece)
    return out


class _FetchRanges(torch.autograd.Function):
    """Autograd Function of ``fetch_ranges``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _Messages) -> Tensor:
        ctx.messages, ctx.n = messages, x.shape[messages.dim]
        return _exchange_messages(x, messages)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReturnGrads.apply(grad, ctx.messages, ctx.n), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _FetchRanges.apply(tangent, ctx.messages)


class _ReturnGrads(torch.autograd.Function):
    """Autograd Function of the backward of ``_FetchRanges``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _Messages, n: int) -> Tensor:
        ctx.messages, ctx.n = messages, n
        return _return_grads(x, messages, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _FetchRanges.apply(grad, ctx.messages), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _ReturnGrads.apply(tangent, ctx.messages, ctx.n)
