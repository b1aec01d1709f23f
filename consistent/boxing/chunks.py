"""Cuts of one boxing into chunks of rows (dim 0), so that other work can overlap the transfer.

Each rank cuts its own rows, on whichever of the two sides has fewer rows per rank. A chunk is then
a tensor of its own with a balanced split: ranks that have one row more than others have that row in
the same chunk.

```
S(0), 5 and 4 rows, 2 chunks          chunk 0        chunk 1
rank 0    a b c d e                   a b c          d e          S(0) of 5 and of 4 rows
rank 1    f g h i                     f g            h i
boxed     a b c d e f g h i           a b c f g      d e h i
```
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from ..spec import Coordinate, Split, TensorSpec, piece


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a boxing, as seen by one rank: which rows to box, and where the result goes.

    It has the specs of the chunk before and after the boxing, and the slices of dim 0 at which its
    rows are in this rank's source shard and in its target shard, in the same order. Code that
    overlaps a boxing with computation boxes one chunk after the other by these.
    """

    src: TensorSpec
    dst: TensorSpec
    src_rows: tuple[slice, ...]
    dst_rows: tuple[slice, ...]


# Handing over a chunk and splitting one call into two smaller ones costs about as much time as one
# more communication (docs/benchmarks.md), so sending a chunk must take several times as long.
_STARTS_PER_CHUNK = 4


def affordable_chunks(src: TensorSpec, dst: TensorSpec, max_chunks: int, start_bytes: int) -> int:
    """Return into how many chunks (at most ``max_chunks``) a boxing should be cut; 1 is uncut.

    Each chunk costs about as much as starting one more communication, so a chunk must have at least
    ``_STARTS_PER_CHUNK * start_bytes`` bytes.

    Args:
        src: spec before the boxing.
        dst: spec after it.
        max_chunks: largest number of chunks allowed.
        start_bytes: bytes that a rank could send in the time that it takes to start a
            communication.
    """
    nbytes = max(src.largest_nbytes, dst.largest_nbytes)
    return max(1, min(max_chunks, nbytes // (_STARTS_PER_CHUNK * start_bytes)))


@lru_cache(maxsize=1 << 12)
def cut_into_chunks(
    src: TensorSpec, dst: TensorSpec, count: int, coordinate: Coordinate
) -> tuple[Chunk, ...]:
    """Cut a boxing into at most ``count`` chunks along dim 0, as seen by one rank.

    No chunk is empty, except that an empty tensor gives one empty chunk. The boxing stays one chunk
    if the sides do not divide the rows alike: each rank of the side with fewer axes that split dim
    0 must hold exactly the rows of some ranks of the other side (``S(0)`` to ``B``, but not zigzag
    to ``B``).

    Args:
        src: spec before the boxing.
        dst: spec after it, on the same placement.
        count: number of chunks wanted.
        coordinate: coordinate of the rank in the placement.
    """
    fine, coarse = (src, dst) if len(_row_axes(src)) > len(_row_axes(dst)) else (dst, src)
    if count < 2 or not _can_share_chunks(fine, coarse):
        all_rows = (
            (slice(0, src.local_shape(coordinate)[0]),),
            (slice(0, dst.local_shape(coordinate)[0]),),
        )
        return (Chunk(src, dst, *all_rows),)
    grid = [fine.placement.shape[axis] for axis in _row_axes(fine)]
    chunks = []
    for k in range(count):
        rows = _chunk_row_count(fine.shape[0], grid, count, k)
        if rows or k == 0:  # an empty tensor still needs one chunk
            specs = [TensorSpec.of(s.placement, s.sbp, (rows, *s.shape[1:]), s.dtype)
                     for s in (src, dst)]  # fmt: skip
            slices = [_chunk_slices(fine, side, count, k, coordinate) for side in (src, dst)]
            chunks.append(Chunk(specs[0], specs[1], slices[0], slices[1]))
    return tuple(chunks)


def _row_axes(spec: TensorSpec) -> list[int]:
    """Return the axes of the placement that split the rows (dim 0)."""
    return [a for a, e in enumerate(spec.sbp) if isinstance(e, Split) and e.dim == 0]


def _can_share_chunks(fine: TensorSpec, coarse: TensorSpec) -> bool:
    """Return whether each rank of ``coarse`` holds exactly the rows of some ranks of ``fine``.

    Only then are the rows of a chunk of ``fine`` also a chunk of ``coarse``. False for layouts with
    a cut, such as zigzag.
    """
    if fine.layout.is_cut or coarse.layout.is_cut:
        return False
    axes = _row_axes(fine)
    return _row_axes(coarse) == axes[: len(_row_axes(coarse))]


def _chunk_row_count(n: int, grid: list[int], count: int, k: int) -> int:
    """Return the number of rows that chunk ``k`` of ``count`` has on all ranks together.

    The ``n`` rows are first split over the ranks, axis by axis as ``grid`` says, and then each rank
    cuts its own rows into ``count`` chunks: ``_chunk_row_count(9, [2], 2, 0)`` is 3 + 2.
    """
    if not grid:
        return piece(n, count, k)[1]
    parts = grid[0]
    return sum(_chunk_row_count(piece(n, parts, i)[1], grid[1:], count, k) for i in range(parts))


def _chunk_slices(
    fine: TensorSpec, side: TensorSpec, count: int, k: int, own_coordinate: Coordinate
) -> tuple[slice, ...]:
    """Return the slices of dim 0 at which a shard of ``side`` has the rows of chunk ``k``.

    There is one slice for each rank of ``fine`` whose rows that shard contains: one if ``side`` is
    ``fine`` itself, and for ``S(0)`` to ``B`` as many as there are ranks.

    Args:
        fine: the spec, of the two of a boxing, in which ranks have fewer rows.
        side: the spec of the shard, either of the two.
        count: number of chunks.
        k: index of the chunk.
        own_coordinate: coordinate of the rank.
    """
    free_axes = set(_row_axes(fine)) - set(_row_axes(side))
    choices = [
        range(n) if a in free_axes else (own_coordinate[a],)
        for a, n in enumerate(fine.placement.shape)
    ]
    begin, slices = side.region(own_coordinate)[0][0], []
    for coordinate in itertools.product(*choices):
        starts, sizes = fine.region(coordinate)
        start, size = piece(sizes[0], count, k)
        start += starts[0] - begin
        slices.append(slice(start, start + size))
    return tuple(slices)
