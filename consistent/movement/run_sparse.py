"""Boxing of sparse tensors, such as the gradients of sparse embeddings.

Entries are sent with their indices in the logical tensor. A sum concatenates the entries of all
ranks, as torch does when it adds sparse tensors, and drops those that belong to other ranks.

Tracers are notified of each move as if it were a whole boxing, with the bytes that it sends. These
depend on how many entries the ranks have, which only the ranks that exchange them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ..boxing.steps import Move, Step
from ..spec import B, Coordinate, Split, TensorSpec, piece
from ..spec.tracer import callbacks

_ON_BOXING_BEGIN, _ON_BOXING_END = callbacks("on_boxing_begin"), callbacks("on_boxing_end")

# All of them join the entries of all ranks; a sum or a split follows on each rank.
_SENDING_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def run_sparse(x: Tensor, src: TensorSpec, moves: Sequence[Step], at: Coordinate) -> Tensor:
    """Return this rank's shard, a sparse COO tensor, after ``moves`` from the spec ``src``.

    Args:
        x: this rank's shard under ``src``.
        src: spec before the moves.
        moves: the moves, each of one axis.
        at: coordinate of this rank in the placement.
    """
    state = src
    for move in moves:
        assert isinstance(move, Move)
        entries = list(state.sbp)
        entries[move.axis] = move.dst
        after = state.with_sbp(tuple(entries))
        x = _run_move(x, state, after, move, at)
        state = after
    return x


def _run_move(
    x: Tensor, state: TensorSpec, after: TensorSpec, move: Move, coordinate: Coordinate
) -> Tensor:
    """Return this rank's shard after one move, from ``state`` to ``after``; notify tracers."""
    ranks, index = state.placement.axis_ranks(move.axis, coordinate), coordinate[move.axis]
    entries = list(state.sbp)
    entries[move.axis] = B
    whole, parts = state.with_sbp(tuple(entries)).local_shape(coordinate), len(ranks)
    if isinstance(move.src, Split) and parts > 1:
        x = _embed_shard(x, move.src.dim, piece(whole[move.src.dim], parts, index)[0], whole)
    sends = parts > 1 and move.kind in _SENDING_KINDS
    counts = gather_from_ranks(x._nnz(), ranks) if sends else [0]
    sent_move = replace(move, nbytes=(parts - 1) * max(counts) * _entry_nbytes(x))
    for notify in _ON_BOXING_BEGIN:
        notify(state, after, (sent_move,))
    if sends:
        x = _gather_entries(x, counts, ranks)
    if move.kind == "keep_first" and index != 0:
        x = _sparse_tensor(x._indices()[:, :0], x._values()[:0], x.shape)
    if isinstance(move.dst, Split) and parts > 1:
        x = _narrow_entries(x, move.dst.dim, *piece(whole[move.dst.dim], parts, index))
    for notify in _ON_BOXING_END:
        notify(state, after)
    return x


def _entry_nbytes(x: Tensor) -> int:
    """Return the bytes of one entry of the sparse ``x``: its indices and its value."""
    indices, values = x._indices(), x._values()
    return len(indices) * indices.itemsize + prod(values.shape[1:]) * values.itemsize


def _gather_entries(x: Tensor, counts: list[int], ranks: tuple[int, ...]) -> Tensor:
    """All-gather the entries of a sparse tensor; ``counts`` are their numbers by rank."""
    transport = current()
    indices = transport.all_gather_into_tensor(x._indices().contiguous(), 1, counts, ranks)
    values = transport.all_gather_into_tensor(x._values().contiguous(), 0, counts, ranks)
    return _sparse_tensor(indices, values, x.shape)


def _embed_shard(x: Tensor, dim: int, start: int, whole: Sequence[int]) -> Tensor:
    """Return the shard ``x`` as part of a sparse tensor of shape ``whole`` without other entries.

    The shard begins at index ``start`` of ``dim``.
    """
    shape = [*x.shape]
    size, shape[dim] = shape[dim], whole[dim]
    indices, values = x._indices(), x._values()
    if dim < x.sparse_dim():
        indices = indices.clone()
        indices[dim] += start
    else:
        at = dim - x.sparse_dim() + 1
        wide = values.new_zeros([*values.shape[:at], whole[dim], *values.shape[at + 1 :]])
        wide.narrow(at, start, size).copy_(values)
        values = wide
    return _sparse_tensor(indices, values, shape)


def _narrow_entries(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Return the part of the sparse ``x`` at [start, start + size) along ``dim``."""
    shape = [*x.shape]
    shape[dim] = size
    indices, values = x._indices(), x._values()
    if dim < x.sparse_dim():
        inside = (indices[dim] >= start) & (indices[dim] < start + size)
        indices, values = indices[:, inside], values[inside]
        # The mask has made a copy, so this does not write into the indices of the caller.
        indices[dim] -= start
    else:
        values = values.narrow(dim - x.sparse_dim() + 1, start, size).contiguous()
    return _sparse_tensor(indices, values, shape)


def _sparse_tensor(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)
