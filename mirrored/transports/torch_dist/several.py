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

from ...comm import Handle, PendingResult, Ranks, Shape, Waitable, concat_output, resize_dim
from ..base.checked import check_shapes
from .described import agreed_layout

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


class _AllOf:
    """Handle of several started operations: ``wait()`` waits for all of them."""

    def __init__(self, handles: Sequence[Waitable]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class Packing(NamedTuple):
    """Which of several tensors share one message, and which have a message of their own.

    Positions are indices into the list of tensors; ``shapes`` and ``agreed_layouts`` have an entry
    for each tensor.
    """

    packed: tuple[int, ...]  # positions of the tensors that share one message
    alone: tuple[int, ...]  # positions of the tensors with a message of their own
    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # of each tensor's piece on each rank
    counts: tuple[tuple[int, ...], ...]  # for each rank, the numel of each of its packed pieces
    # For each tensor the result of `agreed_layout`, which goes into the tags of its messages.
    agreed_layouts: tuple[tuple, ...]


def plan_packing(
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
    whole_bytes = [
        math.prod(resize_dim(shape, dim, sum(own))) * itemsize
        for shape, dim, own in zip(shapes, dims, sizes, strict=True)
    ]
    packed_indices = tuple(i for i, nbytes in enumerate(whole_bytes) if nbytes <= PACKED_BYTES)
    packed_indices = packed_indices if len(packed_indices) > 1 else ()
    pieces = tuple(
        tuple(tuple(resize_dim(shape, dim, size)) for size in own)
        for shape, dim, own in zip(shapes, dims, sizes)
    )
    if piece is not None:
        check_shapes("all_gather: x", shapes, [own[piece] for own in pieces])
    counts = tuple(
        tuple(math.prod(pieces[i][k]) for i in packed_indices) for k in range(len(sizes[0]))
    )
    alone_indices = tuple(i for i in range(len(shapes)) if i not in packed_indices)
    return Packing(
        packed_indices,
        alone_indices,
        pieces,
        counts,
        tuple(map(agreed_layout, shapes, dims, sizes)),
    )


def start_all_gather(
    sender: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    packing: Packing,
    ranks: Ranks,
    out: Sequence[Tensor] | None = None,
) -> PendingResult:
    """Start ``Transport.all_gather_several``; ``wait()`` returns its results.

    ``sender`` starts the messages, and ``packing``, from ``plan_packing``, divides ``xs`` into
    them.
    """
    position, n = ranks.index(sender.rank), len(ranks)
    waits: list[Waitable] = []
    pieces: list[list[Tensor]] = [[] for _ in xs]
    wholes: list[Tensor | None] = [None] * len(xs)
    if packing.packed:
        flat = torch.cat([xs[i].reshape(-1) for i in packing.packed])
        received = [
            flat if k == position else flat.new_empty(sum(packing.counts[k])) for k in range(n)
        ]
        waits.append(sender._start_all_gather("all_gather", flat, received, ranks))
        for k in range(n):
            # Views of the buffers, which are filled once the message has arrived.
            parts = received[k].split_with_sizes(packing.counts[k])
            for i, part in zip(packing.packed, parts):
                pieces[i].append(part.view(packing.shapes[i][k]))
    for i in packing.alone:
        shapes = packing.shapes[i]
        whole, slots = concat_output(xs[i], shapes, dims[i], None if out is None else out[i])
        wholes[i] = whole
        pieces[i] = list(slots or [xs[i].new_empty(shape) for shape in shapes])
        pieces[i][position].copy_(xs[i])
        waits.append(sender._start_all_gather("all_gather", pieces[i][position], pieces[i], ranks))

    def results() -> list[Tensor]:
        tensors = [
            torch.cat(pieces[i], dims[i]) if whole is None else whole
            for i, whole in enumerate(wholes)
        ]
        if out is None:
            return tensors
        return [x if x is place else place.copy_(x) for x, place in zip(tensors, out, strict=True)]

    return PendingResult(_AllOf(waits), results)


def start_reduce_scatter(
    sender: Sender,
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    packing: Packing,
    ranks: Ranks,
    *,
    op: str,
    at_once: bool,
) -> PendingResult:
    """Start ``Transport.reduce_scatter_several``; ``wait()`` returns its results.

    ``sender`` starts the messages, and ``packing``, from ``plan_packing``, divides ``xs`` into
    them. With ``at_once`` all messages are started in this call, so that ``wait()`` does not depend
    on what other ranks do after their own call.
    """
    position, n = ranks.index(sender.rank), len(ranks)
    pieces = [x.split_with_sizes(own, dim) for x, dim, own in zip(xs, dims, sizes, strict=True)]
    handles: list[Handle] = []
    if packing.packed:
        outgoing = [torch.cat([pieces[i][k].reshape(-1) for i in packing.packed]) for k in range(n)]
        handles.append(sender._start_reduce_scatter(outgoing, ranks, op, at_once))
    for i in packing.alone:
        parts = [part.contiguous() for part in pieces[i]]
        handles.append(sender._start_reduce_scatter(parts, ranks, op, at_once))

    def results() -> list[Tensor]:
        sums = [handle.wait() for handle in handles]
        if packing.packed:
            parts = sums.pop(0).split_with_sizes(packing.counts[position])
            sums = [
                part.view(packing.shapes[i][position]) for part, i in zip(parts, packing.packed)
            ] + sums
        sums_by_index = dict(zip([*packing.packed, *packing.alone], sums, strict=True))
        return [sums_by_index[i] for i in range(len(xs))]

    return PendingResult(_AllOf([]), results)
