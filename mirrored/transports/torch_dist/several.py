"""Several tensors gathered, or reduced and scattered, by messages that all travel at once.

Short ones are packed into one message; each of the others has its own, which needs no packing. All
messages are started before any is waited for, so that their latencies do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...comm import Handle, Later, Ranks, Waitable, joinable, resized

# A tensor of at most so many bytes is packed: two copies of it take less time than a message of its
# own takes to be started and received (0.4 ms on two cores that also compute).
PACKED_BYTES = 1 << 20


class Sender(Protocol):
    """What starts the messages; each leaves out this rank's own piece."""

    @property
    def rank(self) -> int: ...

    def _gather(self, name: str, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> Waitable: ...

    def _scatter(self, parts: Sequence[Tensor], ranks: Ranks, op: str, at_once: bool) -> Handle: ...


class _All:
    """Several things under way."""

    def __init__(self, each: Sequence[Waitable]) -> None:
        self._each = each

    def wait(self) -> None:
        for one in self._each:
            one.wait()


def join(
    sent: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    ranks: Ranks,
    out: Sequence[Tensor] | None = None,
) -> Later:
    """Start `Transport.join_several`, of which `wait()` gives the results."""
    me, n = ranks.index(sent.rank), len(ranks)
    shapes = [[resized(x.shape, dim, size) for size in own] for x, dim, own in zip(xs, dims, sizes)]
    packed, alone = _sorted_out(xs, dims, sizes)
    waits: list[Waitable] = []
    pieces: list[list[Tensor]] = [[] for _ in xs]
    made: list[Tensor | None] = [None] * len(xs)
    if packed:
        flat = torch.cat([xs[i].reshape(-1) for i in packed])
        counts = [[math.prod(shapes[i][k]) for i in packed] for k in range(n)]
        arrived = [flat if k == me else flat.new_empty(sum(counts[k])) for k in range(n)]
        waits.append(sent._gather("all_gather", flat, arrived, ranks))
        for k in range(n):
            for i, part in zip(packed, arrived[k].split(counts[k])):
                pieces[i].append(part.view(shapes[i][k]))
    for i in alone:
        whole, slots = joinable(xs[i], shapes[i], dims[i], None if out is None else out[i])
        made[i] = whole
        pieces[i] = list(slots or [xs[i].new_empty(shape) for shape in shapes[i]])
        pieces[i][me].copy_(xs[i])
        waits.append(sent._gather("all_gather", pieces[i][me], pieces[i], ranks))

    def results() -> list[Tensor]:
        found = [
            torch.cat(pieces[i], dims[i]) if whole is None else whole
            for i, whole in enumerate(made)
        ]
        if out is None:
            return found
        return [x if x is place else place.copy_(x) for x, place in zip(found, out, strict=True)]

    return Later(_All(waits), results)


def reduce_scatter(
    sent: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    ranks: Ranks,
    *,
    op: str,
    at_once: bool,
) -> Later:
    """Start `Transport.reduce_scatter_several`, of which `wait()` gives the results. With `at_once`
    that needs no other rank to go on: all messages have been started by then."""
    me, n = ranks.index(sent.rank), len(ranks)
    cut = [x.split(list(own), dim) for x, dim, own in zip(xs, dims, sizes, strict=True)]
    packed, alone = _sorted_out(xs, dims, sizes)
    handles: list[Handle] = []
    if packed:
        going = [torch.cat([cut[i][k].reshape(-1) for i in packed]) for k in range(n)]
        handles.append(sent._scatter(going, ranks, op, at_once))
    for i in alone:
        parts = [part.contiguous() for part in cut[i]]
        handles.append(sent._scatter(parts, ranks, op, at_once))

    def results() -> list[Tensor]:
        sums = [handle.wait() for handle in handles]
        if packed:
            shapes = [cut[i][me].shape for i in packed]
            parts = sums.pop(0).split([math.prod(shape) for shape in shapes])
            sums = [part.view(shape) for part, shape in zip(parts, shapes)] + sums
        found = dict(zip([*packed, *alone], sums, strict=True))
        return [found[i] for i in range(len(xs))]

    return Later(_All([]), results)


def _sorted_out(
    xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The positions of those that are packed, and of the others. All ranks find the same: the bytes
    are those of the whole."""
    whole = [
        math.prod(resized(x.shape, dim, sum(own))) * x.element_size()
        for x, dim, own in zip(xs, dims, sizes, strict=True)
    ]
    packed = [i for i, nbytes in enumerate(whole) if nbytes <= PACKED_BYTES]
    packed = packed if len(packed) > 1 else []
    return packed, [i for i in range(len(xs)) if i not in packed]
