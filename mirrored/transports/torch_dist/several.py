"""Gathers, or reduces and scatters, several tensors by messages that all travel at once.

Short tensors are packed into one message. Each longer one has a message of its own, which saves the
copies for packing. All messages are started before any is waited for, so that their latencies do
not add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...comm import Handle, Later, Ranks, Shape, Waitable, joinable, resized
from ..base.checked import check_shapes
from .described import cut

# A tensor of at most this size is packed: copying it twice takes less time than starting and
# receiving a message of its own (0.4 ms on two cores that also compute).
PACKED_BYTES = 1 << 20


class Sender(Protocol):
    """Protocol of a transport that starts the messages of one gather or reduce-scatter.

    ``TorchDist`` implements it. ``_start_all_gather`` fills ``out`` except for this rank's own
    piece, which the caller has put there. ``_start_reduce_scatter`` combines all ranks'
    ``parts[k]`` on ``ranks[k]``.
    """

    @property
    def rank(self) -> int: ...

    def _start_all_gather(
        self, name: str, x: Tensor, out: Sequence[Tensor], ranks: Ranks
    ) -> Waitable: ...

    def _start_reduce_scatter(
        self, parts: Sequence[Tensor], ranks: Ranks, op: str, at_once: bool
    ) -> Handle: ...


class _All:
    """Several started operations as one: ``wait()`` waits for all of them."""

    def __init__(self, each: Sequence[Waitable]) -> None:
        self._each = each

    def wait(self) -> None:
        for one in self._each:
            one.wait()


class Packing(NamedTuple):
    """Which of several tensors share one message, and which have a message of their own.

    Positions are indices into the list of tensors; ``shapes`` and ``cuts`` have an entry for each
    tensor.
    """

    packed: tuple[int, ...]  # positions of the tensors that share one message
    alone: tuple[int, ...]  # positions of the tensors with a message of their own
    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # of each tensor's piece on each rank
    counts: tuple[tuple[int, ...], ...]  # for each rank, the numel of each of its packed pieces
    cuts: tuple[tuple, ...]  # for each tensor what ranks must agree on, by `cut`, for the tags


def packing(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    piece: int | None = None,
) -> Packing:
    """Return how tensors are divided into messages, the same on all ranks.

    Args:
        xs: this rank's tensors.
        dims: the dim along which each is cut or joined.
        sizes: for each, the sizes of all ranks' pieces along its dim.
        piece: for an all-gather this rank's position in the group, since ``xs`` are its pieces;
            None for a reduce-scatter, where ``xs`` are whole tensors.

    Raises:
        ValueError: a piece does not have the shape that ``sizes`` gives for it.
    """
    shapes, itemsize = tuple(x.shape for x in xs), xs[0].element_size()
    return _packing(shapes, tuple(dims), tuple(map(tuple, sizes)), itemsize, piece)


@lru_cache(1 << 10)
def _packing(
    shapes: tuple[Shape, ...],
    dims: tuple[int, ...],
    sizes: tuple[tuple[int, ...], ...],
    itemsize: int,
    piece: int | None,
) -> Packing:
    # By the bytes of the whole tensor, so that all ranks pack the same tensors.
    whole = [
        math.prod(resized(shape, dim, sum(own))) * itemsize
        for shape, dim, own in zip(shapes, dims, sizes, strict=True)
    ]
    packed = tuple(i for i, nbytes in enumerate(whole) if nbytes <= PACKED_BYTES)
    packed = packed if len(packed) > 1 else ()
    pieces = tuple(
        tuple(tuple(resized(shape, dim, size)) for size in own)
        for shape, dim, own in zip(shapes, dims, sizes)
    )
    if piece is not None:
        check_shapes("all_gather: x", shapes, [own[piece] for own in pieces])
    counts = tuple(tuple(math.prod(pieces[i][k]) for i in packed) for k in range(len(sizes[0])))
    alone = tuple(i for i in range(len(shapes)) if i not in packed)
    return Packing(packed, alone, pieces, counts, tuple(map(cut, shapes, dims, sizes)))


def start_all_gather(
    sent: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    how: Packing,
    ranks: Ranks,
    out: Sequence[Tensor] | None = None,
) -> Later:
    """Start ``Transport.all_gather_several``; ``wait()`` returns its results.

    ``sent`` starts the messages, and ``how``, from ``packing``, divides ``xs`` into them.
    """
    me, n = ranks.index(sent.rank), len(ranks)
    waits: list[Waitable] = []
    pieces: list[list[Tensor]] = [[] for _ in xs]
    made: list[Tensor | None] = [None] * len(xs)
    if how.packed:
        flat = torch.cat([xs[i].reshape(-1) for i in how.packed])
        arrived = [flat if k == me else flat.new_empty(sum(how.counts[k])) for k in range(n)]
        waits.append(sent._start_all_gather("all_gather", flat, arrived, ranks))
        for k in range(n):
            # Views of the buffers, which are filled once the message has arrived.
            parts = arrived[k].split_with_sizes(how.counts[k])
            for i, part in zip(how.packed, parts):
                pieces[i].append(part.view(how.shapes[i][k]))
    for i in how.alone:
        shapes = how.shapes[i]
        whole, slots = joinable(xs[i], shapes, dims[i], None if out is None else out[i])
        made[i] = whole
        pieces[i] = list(slots or [xs[i].new_empty(shape) for shape in shapes])
        pieces[i][me].copy_(xs[i])
        waits.append(sent._start_all_gather("all_gather", pieces[i][me], pieces[i], ranks))

    def results() -> list[Tensor]:
        found = [
            torch.cat(pieces[i], dims[i]) if whole is None else whole
            for i, whole in enumerate(made)
        ]
        if out is None:
            return found
        return [x if x is place else place.copy_(x) for x, place in zip(found, out, strict=True)]

    return Later(_All(waits), results)


def start_reduce_scatter(
    sent: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    how: Packing,
    ranks: Ranks,
    *,
    op: str,
    at_once: bool,
) -> Later:
    """Start ``Transport.reduce_scatter_several``; ``wait()`` returns its results.

    ``sent`` starts the messages, and ``how``, from ``packing``, divides ``xs`` into them. With
    ``at_once`` all messages are started in this call, so that ``wait()`` does not depend on what
    other ranks do after their own call.
    """
    me, n = ranks.index(sent.rank), len(ranks)
    cuts = [x.split_with_sizes(own, dim) for x, dim, own in zip(xs, dims, sizes, strict=True)]
    handles: list[Handle] = []
    if how.packed:
        going = [torch.cat([cuts[i][k].reshape(-1) for i in how.packed]) for k in range(n)]
        handles.append(sent._start_reduce_scatter(going, ranks, op, at_once))
    for i in how.alone:
        parts = [part.contiguous() for part in cuts[i]]
        handles.append(sent._start_reduce_scatter(parts, ranks, op, at_once))

    def results() -> list[Tensor]:
        sums = [handle.wait() for handle in handles]
        if how.packed:
            parts = sums.pop(0).split_with_sizes(how.counts[me])
            sums = [part.view(how.shapes[i][me]) for part, i in zip(parts, how.packed)] + sums
        found = dict(zip([*how.packed, *how.alone], sums, strict=True))
        return [found[i] for i in range(len(xs))]

    return Later(_All([]), results)
