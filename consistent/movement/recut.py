"""Reordering of the items of a dim into the order of the ranks that hold them.

A split such as ``cut="zigzag"`` gives a rank several separate runs of items, (start, size) each.
After the reordering the items of a rank are contiguous, and each move is that of a plain split.

```
S(0, cut="zigzag") of 8 items, 2 ranks     by ranks   0 1 6 7 | 2 3 4 5     logical   0 1 2 ... 7
```
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mirrored.transports.default import current

from ..spec import Runs, Split, intersect_runs

# Dtypes for which torch has no index_copy_ -> an integer dtype of the same size.
_AS_INTEGERS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@lru_cache(maxsize=1 << 10)
def _permutations(entry: Split, n: int, parts: int) -> tuple[Tensor, Tensor] | None:
    """Return permutations of ``n`` items: (logical to rank order, back), on the CPU.

    In rank order the items of rank 0 come first, then those of rank 1, and so on. None if the two
    orders are the same.
    """
    runs = [run for k in range(parts) for run in entry.runs(n, parts, k)]
    if all(a + size == b for (a, size), (b, _) in zip(runs, runs[1:])):
        return None
    by_ranks = indices_of_runs(runs)
    return by_ranks, torch.argsort(by_ranks)


def _as_constant(x: Tensor) -> Tensor:
    """Mark the cached tensor ``x`` as a constant, so that a program that torch records may use it.

    Torch marks the tensors that ``torch.tensor`` makes in the same way.
    """
    return torch.ops.aten.lift_fresh.default(x)


def indices_of_runs(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the indices of the items that ``runs`` contain: ((0, 2), (6, 2)) -> [0, 1, 6, 7]."""
    ranges = [torch.arange(start, start + size) for start, size in runs]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def in_rank_order(x: Tensor, entry: Split, parts: int) -> Tensor:
    """Reorder ``x`` along the split dim, so that the items of each rank are contiguous.

    ``x`` is whole along that dim, and ``parts`` ranks hold it as ``entry`` says. Then a collective
    for balanced splits can send the items.
    """
    order = _permutations(entry, x.shape[entry.dim], parts)
    return x if order is None else x.index_select(entry.dim, _as_constant(order[0]).to(x.device))


def in_logical_order(x: Tensor, entry: Split, parts: int) -> Tensor:
    """Undo ``in_rank_order``: reorder ``x`` along the split dim as in the logical tensor."""
    order = _permutations(entry, x.shape[entry.dim], parts)
    return x if order is None else x.index_select(entry.dim, _as_constant(order[1]).to(x.device))


def select_runs(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """Return the items of ``x`` in ``runs`` along ``dim``; a view if there is one run."""
    if len(runs) < 2:
        start, size = runs[0] if runs else (0, 0)
        return x.narrow(dim, start, size)
    return x.index_select(dim, indices_of_runs(runs).to(x.device))


def embed_runs(x: Tensor, dim: int, runs: Runs, total: int, rest: float) -> Tensor:
    """Return a tensor with ``total`` items along ``dim``, of which those in ``runs`` are ``x``.

    All other items have the value ``rest``: ``[5, 6]`` with runs ((1, 2),), total 4 and rest 0
    gives [0, 5, 6, 0].
    """
    shape = list(x.shape)
    shape[dim] = total
    out = torch.full(shape, rest, dtype=x.dtype, device=x.device)
    return _copy_to_indices(out, dim, indices_of_runs(runs), x)


def convert_split(
    x: Tensor, src: Split, dst: Split, n: int, index: int, ranks: tuple[int, ...]
) -> Tensor:
    """Convert a shard from the split ``src`` to the split ``dst`` of the same dim.

    ``src`` and ``dst`` are divided differently, such as S(0) and S(0, cut="zigzag"). Each rank is
    sent only the items that it lacks.

    Args:
        x: this rank's items.
        src: the split that ``x`` has.
        dst: the split to convert to.
        n: number of items of the dim.
        index: this rank's position in ``ranks``.
        ranks: the ranks that hold the items.

    Returns:
        This rank's items under ``dst``.
    """
    dim, parts = src.dim, len(ranks)
    own_runs, target_runs = src.runs(n, parts, index), dst.runs(n, parts, index)
    pieces, shapes, target_indices = [], [], []
    for k in range(parts):
        outgoing = intersect_runs(own_runs, dst.runs(n, parts, k))
        incoming = intersect_runs(src.runs(n, parts, k), target_runs)
        pieces.append(select_runs(x, dim, _runs_within(outgoing, own_runs)).contiguous())
        target_indices.append(indices_of_runs(_runs_within(incoming, target_runs)))
        shapes.append((*x.shape[:dim], len(target_indices[-1]), *x.shape[dim + 1 :]))
    received = current().all_to_all(pieces, shapes, ranks)
    out = x.new_empty([*x.shape[:dim], sum(map(len, target_indices)), *x.shape[dim + 1 :]])
    for part, indices in zip(received, target_indices, strict=True):
        _copy_to_indices(out, dim, indices, part)
    return out


def _copy_to_indices(out: Tensor, dim: int, indices: Tensor, x: Tensor) -> Tensor:
    """Write ``x`` into ``out`` at ``indices`` along ``dim``, and return ``out``.

    It is ``out.index_copy_(dim, indices, x)`` for all dtypes. Those that torch does not support
    there, such as float8, are copied as integers.
    """
    integer_dtype, indices = _AS_INTEGERS.get(x.dtype), indices.to(x.device)
    if integer_dtype is None:
        return out.index_copy_(dim, indices, x)
    out.view(integer_dtype).index_copy_(dim, indices, x.view(integer_dtype))
    return out


def _runs_within(items: Runs, held: Runs) -> Runs:
    """Return the runs of ``items`` within a shard that holds the items ``held`` in order.

    With ``held`` ((0, 2), (6, 2)) the items ((6, 1),) are at ((2, 1),).
    """
    positions, offset, i = [], 0, 0
    for start, size in items:
        # Both are in the same order, so ``i`` never has to go back.
        while start >= held[i][0] + held[i][1]:
            offset += held[i][1]
            i += 1
        positions.append((offset + start - held[i][0], size))
    return tuple(positions)
