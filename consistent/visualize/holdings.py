"""Part of a tensor that each rank of a placement holds, for pictures of the tensor.

It is described as text, and as ranges of the two dims that are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import Coordinate, Partial, Runs, Split, TensorSpec, item_count, piece
from ..spec.bytes_text import bytes_text


@dataclass(frozen=True, slots=True)
class RankPart:
    """Part of a tensor that one rank holds.

    Args:
        rank: its number in the world.
        region: the part of the logical tensor, as a slice: ``[0:4, :]``.
        role: ``copy 1/2`` or ``addend 2/2``, or "" for a piece that no other rank has.
        nbytes: bytes of its shard.
        piece: index of the region; ranks with equal indices hold the same region.
        is_addend: whether the tensor is the sum (maximum, minimum) of what several ranks hold.
        runs: for each dim, (start, size) of each range of consecutive indices that it holds.
        sizes: shape of its shard.
    """

    rank: int
    region: str
    role: str
    nbytes: int
    piece: int
    is_addend: bool
    runs: tuple[Runs, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """True if the rank holds no elements."""
        return 0 in self.sizes


def rank_part(spec: TensorSpec, at: Coordinate) -> RankPart:
    """Return the part of a tensor of ``spec`` that the rank at grid coordinate ``at`` holds."""
    runs, sizes = spec.runs(at), spec.local_shape(at)
    grid = spec.placement.shape
    roles = []
    for word, axes in (("addend", _axes_of_kind(spec, "P")), ("copy", _axes_of_kind(spec, "B"))):
        count = math.prod(grid[a] for a in axes)
        if count > 1:
            roles.append(
                f"{word} {_flat_index([at[a] for a in axes], [grid[a] for a in axes]) + 1}/{count}"
            )
    split_axes = [a for a, entry in enumerate(spec.sbp) if entry.is_split]
    return RankPart(
        rank=spec.placement.rank_at(at),
        region=region_text(spec, runs),
        role=", ".join(roles),
        nbytes=math.prod(sizes) * spec.dtype.itemsize,
        piece=_flat_index([at[a] for a in split_axes], [grid[a] for a in split_axes]),
        is_addend=bool(_axes_of_kind(spec, "P")),
        runs=runs,
        sizes=sizes,
    )


def region_text(spec: TensorSpec, runs: Sequence[Runs]) -> str:
    """Return a held region as text: ``[0:4, :]``, or ``[0:2 6:8, :]`` for two ranges in a dim.

    It is ``empty`` if the rank holds nothing of a tensor that has elements. ``runs`` are those of
    ``RankPart``.
    """
    if not spec.shape:
        return "scalar"
    counts = [item_count(each) for each in runs]
    if 0 in counts and spec.numel:
        return "empty"
    parts = (
        ":" if size == n else " ".join(f"{start}:{start + m}" for start, m in each)
        for each, size, n in zip(runs, counts, spec.shape, strict=True)
    )
    return f"[{', '.join(parts)}]"


def drawn_dims(spec: TensorSpec) -> tuple[int, ...]:
    """Return the dims that a drawing of the tensor shows, at most two, in ascending order.

    Split dims are preferred, then the last dims. The last one goes from left to right.
    """
    split_dims = list(dict.fromkeys(e.dim for e in spec.sbp if isinstance(e, Split)))
    rest = [dim for dim in reversed(range(spec.ndim)) if dim not in split_dims]
    return tuple(sorted([*split_dims, *rest][:2]))


def spans(spec: TensorSpec, held: RankPart, dim: int | None) -> list[tuple[float, float]]:
    """Return (begin, end) of the ranges that a rank holds along ``dim``, as fractions of the dim.

    Indices 2 to 3 of 8 give (0.25, 0.5). If ``dim`` is None, the result is the whole, [(0, 1)].
    """
    if dim is None:
        return [(0.0, 1.0)]
    n = max(1, spec.shape[dim])
    return [(start / n, (start + size) / n) for start, size in held.runs[dim]]


def sentences(spec: TensorSpec) -> list[str]:
    """Return sentences, one for each axis, on what the axis does to the tensor.

    The last sentence says how many bytes a rank holds.
    """
    lines = []
    for axis, (n, entry) in enumerate(zip(spec.placement.shape, spec.sbp, strict=True)):
        names = spec.placement.axes
        name = f"axis {axis}" + (f" ({names[axis]})" if names else "")
        subject = f"{name}, {n:,} rank{'s' if n != 1 else ''}: {entry}"
        lines.append(f"{subject}, {_axis_sentence(spec, axis)}" if n > 1 else f"{subject}, alone")
    most, whole = spec.largest_nbytes, spec.nbytes
    share = f" ({share_text(most / whole)})" if whole else ""
    together = bytes_text(bytes_together(spec))
    lines.append(
        f"a rank holds at most {bytes_text(most)} of {bytes_text(whole)}{share}; "
        f"all {spec.placement.size:,} together {together}"
    )
    return lines


def share_text(share: float) -> str:
    """Return a share as text: ``38%`` or ``0.39%``."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"


def bytes_together(spec: TensorSpec) -> int:
    """Return the bytes that all ranks hold together.

    The tensor counts once for each copy and each addend: k times on k ranks with B or P.
    """
    times = zip(spec.placement.shape, spec.sbp, strict=True)
    return spec.nbytes * math.prod(n for n, entry in times if not entry.is_split)


def _axis_sentence(spec: TensorSpec, axis: int) -> str:
    entry = spec.sbp[axis]
    if isinstance(entry, Partial):
        operation = {"sum": "sum", "max": "elementwise maximum", "min": "elementwise minimum"}[
            entry.op
        ]
        kind = "an addend" if entry.op == "sum" else "a part"
        return f"each holds {kind}; the tensor is their {operation}"
    if not isinstance(entry, Split):
        return "each holds a copy"
    sizes = {spec.shape[entry.dim]}
    for n, earlier in itertools.islice(zip(spec.placement.shape, spec.sbp), axis + 1):
        if earlier is entry and isinstance(entry, Split) and entry.cut is not None:
            sizes = {entry.size(size, n, k) for size in sizes for k in range(n)}
        elif isinstance(earlier, Split) and earlier.dim == entry.dim:
            # Balanced pieces have at most two sizes: ranks below size % n have one item more.
            sizes = {piece(size, n, k)[1] for size in sizes for k in (0, size % n, n - 1) if k < n}
    size_text = " or ".join(f"{size:,}" for size in sorted(sizes, reverse=True))
    return f"dim {entry.dim} of {spec.shape[entry.dim]:,} is cut into pieces of {size_text}"


def _axes_of_kind(spec: TensorSpec, kind: str) -> list[int]:
    matches = (lambda e: e.is_partial) if kind == "P" else (lambda e: e.is_broadcast)
    return [axis for axis, entry in enumerate(spec.sbp) if matches(entry)]


def _flat_index(at: Sequence[int], grid: Sequence[int]) -> int:
    """Return the row-major index of the coordinate ``at`` in a grid."""
    number = 0
    for index, n in zip(at, grid, strict=True):
        number = number * n + index
    return number


def shown_indices(n: int, most: int) -> list[int | None]:
    """Return the indices to show out of ``n`` items where at most ``most`` fit.

    None stands for those left out: ``shown_indices(9, 4)`` gives [0, 1, None, 8].
    """
    if n <= most:
        return list(range(n))
    if most < 3:
        return [0, None][:most]
    return [*range(most - 2), None, n - 1]
