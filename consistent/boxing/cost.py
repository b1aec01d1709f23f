"""Bytes of the moves of a boxing plan.

They are exact: uneven shards are sent as they are, without padding. ``CostModel.move_seconds`` says
how long a move takes. Local copies are nearly free but not free, so that of two plans that send the
same bytes, the plan that touches less memory in fewer moves wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..spec import NdSbp, Sbp, Split, intersect_runs, item_count, piece

LOCAL_KINDS = ("slice", "keep_first", "keep", "pad")


def total_bytes(
    now: Sbp, entry: Sbp, axis: int, grid: Sequence[int], sbp: NdSbp, nbytes: int
) -> int:
    """Return the bytes that all ranks together send in a move of one axis.

    Args:
        now: SBP of the axis before the move.
        entry: SBP of the axis after it; a move from S to S is not covered, and gives 0.
        axis: the axis.
        grid: shape of the placement.
        sbp: SBPs of all axes before the move. Along each other axis that is B or P the ranks do the
            same move, each with a whole tensor or addend; along one that is S they share it.
        nbytes: bytes of the logical tensor.
    """
    copies = math.prod(n for a, n in enumerate(grid) if a != axis and not sbp[a].is_split)
    if now.is_partial:
        return (1 if entry.is_split else 2) * (grid[axis] - 1) * copies * nbytes
    return (grid[axis] - 1) * copies * nbytes if now.is_split and entry.is_broadcast else 0


def whole_sizes(
    shape: Sequence[int], grid: Sequence[int], sbp: NdSbp, axis: int
) -> tuple[int, ...]:
    """Return the sizes of what the ranks along ``axis`` hold together, as if it did not split.

    With ``shape`` (8, 6) on a 2 x 3 ``grid``, ``sbp`` (S(0), S(1)) and ``axis`` 1 it is (4, 6). If
    dims are divided unevenly these are the sizes for the ranks that have most.
    """
    sizes = list(shape)
    for a, entry in enumerate(sbp):
        if a != axis and isinstance(entry, Split):
            sizes[entry.dim] = largest_piece(entry, sizes[entry.dim], grid[a])
    return tuple(sizes)


def largest_piece(entry: Split, n: int, parts: int) -> int:
    """Return how many of ``n`` items the rank with the most items holds, of ``parts`` ranks."""
    if entry.cut is None:
        return piece(n, parts, 0)[1]
    return max(entry.size(n, parts, k) for k in range(parts))


def move_bytes(
    src: Sbp, dst: Sbp, whole: Sequence[int], parts: int, itemsize: int
) -> tuple[int, int]:
    """Return (bytes that the busiest rank sends, bytes of the largest result) of one move.

    Args:
        src: SBP of the axis before the move.
        dst: SBP of the axis after the move.
        whole: sizes of what the ranks of the axis hold together, from ``whole_sizes``.
        parts: number of ranks along the axis.
        itemsize: bytes of one element.
    """
    total = math.prod(whole) * itemsize
    if any(isinstance(entry, Split) and entry.cut is not None for entry in (src, dst)):
        return _cut_bytes(src, dst, whole, parts, total)
    result = _piece_bytes(total, whole, dst.dim, parts, 0) if isinstance(dst, Split) else total
    if src.is_broadcast or (src.is_split and dst.is_partial):
        return 0, result
    if isinstance(src, Split):
        if isinstance(dst, Split):
            return _all_to_all_bytes(total, whole, (src.dim, dst.dim), parts), result
        return (parts - 1) * _piece_bytes(total, whole, src.dim, parts, 0), result
    if isinstance(dst, Split):
        return total - _piece_bytes(total, whole, dst.dim, parts, parts - 1), result
    # P -> B is an all-reduce: a ring sends 2 * (parts - 1) / parts of the data. Rounded up.
    return -(-2 * (parts - 1) * total // parts), result


def _cut_bytes(src: Sbp, dst: Sbp, whole: Sequence[int], parts: int, total: int) -> tuple[int, int]:
    """Return what ``move_bytes`` returns, for a move where ``src`` or ``dst`` has a cut.

    A cut, such as ``S(0, cut="zigzag")``, divides a dim into pieces that are not balanced.
    ``total`` is the bytes of what the ranks of the axis hold together.
    """
    if total == 0:
        return 0, 0
    if isinstance(src, Split) and isinstance(dst, Split):
        n, m = whole[src.dim], whole[dst.dim]
        result = total // m * largest_piece(dst, m, parts)
        if src.dim == dst.dim:
            missing = (
                src.size(n, parts, k) - _kept_count(src, dst, n, parts, k) for k in range(parts)
            )
            return total // n * max(missing), result
        sent_items = (src.size(n, parts, k) * (m - dst.size(m, parts, k)) for k in range(parts))
        return total // (n * m) * max(sent_items), result
    if isinstance(src, Split):
        sent_bytes = (
            (parts - 1) * (total // whole[src.dim]) * largest_piece(src, whole[src.dim], parts)
        )
        return (sent_bytes if dst.is_broadcast else 0), total
    assert isinstance(dst, Split)
    n = whole[dst.dim]
    shard_bytes = [total // n * dst.size(n, parts, k) for k in range(parts)]
    return (0 if src.is_broadcast else total - min(shard_bytes)), max(shard_bytes)


def _kept_count(src: Split, dst: Split, n: int, parts: int, k: int) -> int:
    """Return how many items rank ``k`` holds both before and after the move, and so need not send.

    ``src`` and ``dst`` are two ways to split the same dim of ``n`` items over ``parts`` ranks.
    """
    return item_count(intersect_runs(src.runs(n, parts, k), dst.runs(n, parts, k)))


def _piece_bytes(total: int, whole: Sequence[int], dim: int, parts: int, index: int) -> int:
    """Return how many of ``total`` bytes are in one piece of a tensor of sizes ``whole``.

    It is piece ``index`` of dim ``dim``, split into ``parts`` balanced pieces.
    """
    n = whole[dim]
    return total // n * piece(n, parts, index)[1] if n else 0


def _all_to_all_bytes(total: int, whole: Sequence[int], dims: tuple[int, int], parts: int) -> int:
    """Return the bytes that the busiest rank sends in S(i) -> S(j), with ``dims`` (i, j).

    ``total`` is the bytes of what the ranks hold together, ``whole`` its sizes.
    """
    i, j = (whole[dim] for dim in dims)
    if total == 0:
        return 0
    # Balanced piece sizes along i and j drop by one at ranks i % parts and j % parts, so rank 0 and
    # these two ranks cover every combination of sizes.
    return max(
        total // (i * j) * piece(i, parts, k)[1] * (j - piece(j, parts, k)[1])
        for k in (0, i % parts, j % parts)
    )
