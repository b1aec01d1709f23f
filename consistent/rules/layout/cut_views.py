"""Views of a tensor whose split has a cut (unbalanced pieces): how the view is then split.

The cuts are those of ``S(d, cut=, of=, blocks=, sizes=)``, see ``spec/cut.py``.

```
[2, 8] -> [16]     S(1, cut="zigzag")          -> S(0, cut="zigzag", of=8)     runs side by side
[16] -> [2, 8]     S(0, cut="zigzag", of=8)    -> S(1, cut="zigzag")
[12] -> [3, 4]     S(0, of=4)                  -> S(1)
[12] -> [3, 4]     S(0, blocks=4)              -> S(0, blocks=1)               4 items become one
[3, 4] -> [12]     S(0, blocks=1)              -> S(0, blocks=4)
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...spec import Runs, Split
from ...spec.cut import DimCut, cut_of, merge_runs

Shape = Sequence[int]


def split_of_view(
    entry: Split, groups: list[tuple[range, range]], source: Shape, target: Shape, parts: int
) -> Split | None:
    """Return the split of a view of shape ``target`` whose operand is split as ``entry``.

    None if no split of a single dim gives every rank the elements that it has.

    Args:
        entry: the operand's split, usually with a cut.
        groups: pairs of ranges of dims of both shapes with equal products, see ``view.dim_groups``.
        source: the operand's shape.
        target: the view's shape.
        parts: the number of ranks.
    """
    pair = next((g for g in groups if entry.dim in g[0]), None)
    if pair is None:
        return None
    ins, outs = pair
    n = source[entry.dim]
    before = math.prod(source[ins.start : entry.dim])
    after = math.prod(source[entry.dim + 1 : ins.stop])
    # Runs are compared in elements of the group: those of a dim occur once per index before it.
    operand_runs = [_scaled_runs(entry.runs(n, parts, k), after) for k in range(parts)]
    for o in outs:
        repeats = math.prod(target[outs.start : o])
        span = math.prod(target[o + 1 : outs.stop])
        for candidate in _candidate_splits(entry, n, after, span, before, repeats, target[o]):
            if candidate.cut is None or candidate.cut.invalid_reason(target[o], parts) is None:
                view_runs = [
                    _scaled_runs(candidate.runs(target[o], parts, k), span) for k in range(parts)
                ]
                if _cover_same_elements(
                    operand_runs, n * after, before, view_runs, target[o] * span, repeats
                ):
                    return Split(o, candidate.cut)
    return None


def _candidate_splits(
    entry: Split, n: int, after: int, span: int, before: int, repeats: int, m: int
) -> list[Split]:
    """Return the splits of the view's dim, of ``m`` items, that may give ranks their elements.

    ``split_of_view`` then checks which elements each split gives each rank. Only the cuts of the
    splits matter; their dim is that of the operand.

    Args:
        entry: the operand's split, of a dim of ``n`` items.
        after, span: elements in one item of the operand's dim, and of the view's dim.
        before, repeats: how often the operand's dim, and the view's dim, occur in the group.
    """
    if m == 0:
        return []
    cut = entry.cut or DimCut(None, False, None, None)
    blocks, sizes, of = (_rescaled_count(x, after, span) for x in (cut.blocks, cut.sizes, cut.of))
    length = _rescaled_count(n, after, span)
    part_sizes: list[object] = [None, of]  # values of ``of=``; the shortest text comes first
    if isinstance(length, int) and before != repeats:
        part_sizes.append(length)
        if isinstance(of, tuple):
            part_sizes += [of * (before // repeats)] if before % repeats == 0 else []
            part_sizes += [of[: len(of) * before // repeats]] if repeats % before == 0 else []
    kind = "zigzag" if cut.zigzag else None
    cuts = [
        cut_of(blocks, kind, sizes, part_size)
        for part_size in dict.fromkeys(part_sizes)
        if _is_valid_part_size(part_size)
    ]
    is_lossy = (cut.blocks is not None and blocks is None) or (
        cut.sizes is not None and sizes is None
    )
    return [] if is_lossy else [Split(entry.dim, new_cut) for new_cut in cuts]


def _is_valid_part_size(of: object) -> bool:
    """Return whether ``of`` is a value that ``S(d, of=...)`` takes: None, or positive sizes."""
    return of is None or (isinstance(of, int) and of > 0) or (isinstance(of, tuple) and len(of) > 0)


def _rescaled_count(x: int | tuple[int, ...] | None, after: int, span: int) -> object:
    """Return how many items of ``span`` elements make ``x`` items of ``after`` elements.

    3 items of 4 elements are 6 items of 2, and no whole number of items of 8: None. ``x`` may be a
    tuple of such numbers, or None, which gives None.
    """
    if x is None:
        return None
    if isinstance(x, tuple):
        counts = [_rescaled_count(count, after, span) for count in x]
        return None if None in counts else tuple(counts)
    return x * after // span if x * after % span == 0 else None


def _scaled_runs(runs: Runs, factor: int) -> Runs:
    return tuple((start * factor, size * factor) for start, size in runs)


def _cover_same_elements(
    operand_runs: Sequence[Runs],
    length: int,
    times: int,
    view_runs: Sequence[Runs],
    view_length: int,
    repeats: int,
) -> bool:
    """Return whether each rank's runs (start, size) of operand and view are the same elements.

    Args:
        operand_runs, length, times: runs of the operand by rank, which occur ``times`` times, every
            ``length`` elements.
        view_runs, view_length, repeats: in the same way those of the view.
    """
    # Both sides repeat this often, so one repetition is compared.
    common_repeats = math.gcd(times, repeats)
    return all(
        _repeated_runs(a, length, times // common_repeats)
        == _repeated_runs(b, view_length, repeats // common_repeats)
        for a, b in zip(operand_runs, view_runs, strict=True)
    )


def _repeated_runs(runs: Runs, length: int, times: int) -> Runs:
    """Return ``runs`` repeated ``times`` times, every ``length`` elements.

    Runs that touch are merged, so that equal elements have equal runs.
    """
    return merge_runs((start + k * length, size) for k in range(times) for start, size in runs)
