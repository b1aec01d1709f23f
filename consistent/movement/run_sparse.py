"""Boxing of sparse tensors, such as the gradients of sparse embeddings.

Entries are sent with their indices in the logical tensor. A sum concatenates the entries of all
ranks, as torch does when it adds sparse tensors, and drops those that belong to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirrored.every_rank import gathered
from mirrored.transports.default import current

from ..boxing.steps import Move, Step
from ..spec import B, Coordinate, Split, TensorSpec, piece


def run_sparse(x: Tensor, src: TensorSpec, moves: Sequence[Step], at: Coordinate) -> Tensor:
    """Return this rank's shard, a sparse COO tensor, after ``moves`` from the spec ``src``.

    ``x`` is its shard under ``src``, ``at`` its coordinate in the placement.
    """
    state = src
    for move in moves:
        assert isinstance(move, Move)
        if state.placement.shape[move.axis] > 1:
            x = _moved(x, state, move, at)
        entries = list(state.sbp)
        entries[move.axis] = move.dst
        state = state.with_sbp(tuple(entries))
    return x


def _moved(x: Tensor, state: TensorSpec, move: Move, at: Coordinate) -> Tensor:
    parts, index = state.placement.shape[move.axis], at[move.axis]
    entries = list(state.sbp)
    entries[move.axis] = B
    whole = state.with_sbp(tuple(entries)).local_shape(at)
    if isinstance(move.src, Split):
        x = _placed(x, move.src.dim, piece(whole[move.src.dim], parts, index)[0], whole)
    if move.kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        x = _side_by_side(x, state.placement.axis_ranks(move.axis, at))
    if move.kind == "keep_first" and index != 0:
        x = _of(x._indices()[:, :0], x._values()[:0], x.shape)
    if isinstance(move.dst, Split):
        x = _cut(x, move.dst.dim, *piece(whole[move.dst.dim], parts, index))
    return x


def _side_by_side(x: Tensor, ranks: tuple[int, ...]) -> Tensor:
    transport = current()
    counts = gathered(x._nnz(), ranks)
    indices = transport.join(x._indices().contiguous(), 1, counts, ranks)
    values = transport.join(x._values().contiguous(), 0, counts, ranks)
    return _of(indices, values, x.shape)


def _placed(x: Tensor, dim: int, start: int, whole: Sequence[int]) -> Tensor:
    """Return the shard ``x`` as a tensor of shape ``whole`` that is empty elsewhere.

    The shard begins at ``start`` along ``dim``.
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
    return _of(indices, values, shape)


def _cut(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Return the part of ``x`` in [start, start + size) along ``dim``."""
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
    return _of(indices, values, shape)


def _of(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)
