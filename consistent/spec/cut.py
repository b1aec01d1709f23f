"""Cuts: how a split divides its dim among ranks if the pieces are not balanced runs of items.

```
8 items on 2 ranks        rank 0        rank 1
S(0)                      0 1 2 3       4 5 6 7     balanced: this split has no ``DimCut``
S(0, blocks=1)            0 2 4 6       1 3 5 7     blocks of this many items, dealt in turn
S(0, cut="zigzag")        0 1 6 7       2 3 4 5     2k balanced chunks; rank r has the r-th from
                                                    the front and the r-th from the end
S(0, sizes=(3, 5))        0 1 2         3 4 5 6 7   pieces of these sizes
S(0, of=4)                0 1 4 5       2 3 6 7     each run of 4 items is divided separately
S(0, of=(2, 6))           0 2 3 4       1 5 6 7     each part of these sizes is divided separately
```

``of`` can be combined with each of the others: ``S(0, cut="zigzag", of=4)``. A shard stores the
items of its rank in the order of the logical tensor. A run is a range (start, size) of consecutive
items of the dim.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

Runs = tuple[tuple[int, int], ...]  # (start, size) of disjoint runs of items, ascending

ZIGZAG = "zigzag"


def piece(n: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, size) of piece ``index`` of ``n`` items in ``parts`` balanced pieces.

    With n = q * parts + r the first r pieces hold q + 1 items and the others q, so a piece may be
    empty.
    """
    q, r = divmod(n, parts)
    return index * q + min(index, r), q + (index < r)


class DimCut:
    """Division of a dim that is not balanced: the arguments after the dim in ``S(dim, ...)``.

    ``S(0, blocks=2)`` is ``Split(0, cut_of(blocks=2))``. Instances are immutable and interned, so
    they compare by identity; make one with ``cut_of``.
    """

    __slots__ = ("__weakref__", "blocks", "of", "sizes", "zigzag")

    _instances: weakref.WeakValueDictionary[tuple, DimCut] = weakref.WeakValueDictionary()
    blocks: int | None
    zigzag: bool
    sizes: tuple[int, ...] | None
    of: int | tuple[int, ...] | None

    def __new__(
        cls,
        blocks: int | None,
        zigzag: bool,
        sizes: tuple[int, ...] | None,
        of: int | tuple[int, ...] | None,
    ) -> DimCut:
        key = (blocks, zigzag, sizes, of)
        instance = cls._instances.get(key)
        if instance is None:
            instance = super().__new__(cls)
            for name, value in zip(("blocks", "zigzag", "sizes", "of"), key, strict=True):
                object.__setattr__(instance, name, value)
            instance = cls._instances.setdefault(key, instance)
        return instance

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} is a value and cannot be changed; write S(dim, ...) again.")

    def __reduce__(self) -> tuple:
        return (DimCut, (self.blocks, self.zigzag, self.sizes, self.of))

    def __copy__(self) -> DimCut:
        return self

    def __deepcopy__(self, memo: dict) -> DimCut:
        return self

    def __repr__(self) -> str:
        words = []
        if self.blocks is not None:
            words.append(f"blocks={self.blocks}")
        if self.zigzag:
            words.append(f'cut="{ZIGZAG}"')
        if self.sizes is not None:
            words.append(f"sizes={self.sizes}")
        if self.of is not None:
            words.append(f"of={self.of}")
        return ", ".join(words)

    # -- items of each rank ------------------------------------------------------------------------

    def runs(self, n: int, parts: int, index: int) -> Runs:
        """Return the runs, (start, size), of ``n`` items that rank ``index`` of ``parts`` holds.

        ``blocks=2`` of 8 items on 2 ranks gives rank 1 the runs ((2, 2), (6, 2)).
        """
        return _runs(self, n, parts, index)

    def size(self, n: int, parts: int, index: int) -> int:
        """Return how many of ``n`` items rank ``index`` of ``parts`` holds.

        ``sizes=(3, 5)`` of 8 items on 2 ranks gives rank 1 five.
        """
        return item_count(self.runs(n, parts, index))

    def min_items(self, parts: int) -> int:
        """Return the smallest number of items with which each of ``parts`` ranks has at least one.

        ``Layout`` uses it to tell whether some rank has an empty shard. The result is 1 if the cut
        itself fixes all sizes and no rank is empty. It is ``1 << 62``, which no dim has, if some
        rank stays empty for any number of items.
        """
        if self.sizes is not None:
            return 1 if all(self.sizes) or parts == 1 else 1 << 62
        if isinstance(self.of, tuple):
            n = sum(self.of)
            return 1 if all(self.size(n, parts, k) for k in range(parts)) else 1 << 62
        fewest = parts if self.blocks is None else (parts - 1) * self.blocks + 1
        # Every run of ``of`` items is divided the same way, so a run that is too short for all
        # ranks leaves the same ranks empty however many runs there are.
        return fewest if self.of is None or self.of >= fewest else 1 << 62

    def parts_of(self, n: int) -> list[tuple[int, int]]:
        """Return (start, size) of each part of ``n`` items that is divided separately.

        With ``of=4`` and 8 items they are [(0, 4), (4, 4)]; without ``of`` there is one, all items.
        """
        if self.of is None:
            return [(0, n)]
        sizes = self.of if isinstance(self.of, tuple) else (self.of,) * (n // self.of)
        starts, start = [], 0
        for size in sizes:
            starts.append((start, size))
            start += size
        return starts

    def cut_of_slice(self, n: int, start: int, size: int) -> tuple[DimCut, ...] | None:
        """Return the cut by which ranks hold the slice [start, start + size) of ``n`` items.

        There is such a cut if ``of`` divides the items into parts, and the slice consists of whole
        parts. Then slicing needs no communication.

        Returns:
            The arguments after the dim in ``Split(dim, ...)``: ``(cut,)``, or ``()`` if the slice
                is split into balanced pieces. None if the slice does not consist of whole parts, or
                if this cut has no ``of``.
        """
        part_sizes = [m for a, m in self.parts_of(n) if start <= a and a + m <= start + size]
        if self.of is None or sum(part_sizes) != size or not part_sizes:
            return None
        of = (
            None
            if len(part_sizes) == 1
            else part_sizes[0]
            if len(set(part_sizes)) == 1
            else tuple(part_sizes)
        )
        cut = cut_of(self.blocks, ZIGZAG if self.zigzag else None, self.sizes, of)
        return () if cut is None else (cut,)

    def invalid_reason(self, n: int, parts: int) -> str | None:
        """Return why this cut cannot divide ``n`` items among ``parts`` ranks; None if it can.

        The reason is text for an error: "the sizes (3, 5) have 8 items together, and the dim has 9
        items".
        """
        if isinstance(self.of, tuple) and sum(self.of) != n:
            return f"the parts in of={self.of} have {sum(self.of)} items together, and not {n}"
        if isinstance(self.of, int) and n % self.of:
            return f"{n} items are no whole number of parts of {self.of}"
        if self.sizes is None:
            return None
        if len(self.sizes) != parts:
            return f"there are {len(self.sizes)} sizes, and the axis has {parts} ranks"
        total = sum(self.sizes)
        if any(size != total for _, size in self.parts_of(n)):
            whole = f"{n} items" if self.of is None else f"parts of {self.of} items"
            return f"the sizes {self.sizes} have {total} items together, and the dim has {whole}"
        return None


@lru_cache(maxsize=1 << 12)
def _runs(cut: DimCut, n: int, parts: int, index: int) -> Runs:
    return merge_runs(
        (first + start, size)
        for first, count in cut.parts_of(n)
        for start, size in _runs_in_part(cut, count, parts, index)
    )


def _runs_in_part(cut: DimCut, n: int, parts: int, index: int) -> Iterator[tuple[int, int]]:
    """Yield the runs that rank ``index`` has in one part of ``n`` items that is divided by itself.

    A run may be empty, or begin where the one before it ends.
    """
    if cut.zigzag:
        yield piece(n, 2 * parts, index)
        yield piece(n, 2 * parts, 2 * parts - 1 - index)
    elif cut.sizes is not None:
        yield sum(cut.sizes[:index]), cut.sizes[index]
    elif cut.blocks is not None:
        for start in range(index * cut.blocks, n, parts * cut.blocks):
            yield start, min(cut.blocks, n - start)
    else:
        yield piece(n, parts, index)


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return ``runs``, (start, size), without empty ones and with adjacent ones merged.

    They must be ascending: ((0, 2), (2, 3), (7, 0)) -> ((0, 5),).
    """
    merged: list[tuple[int, int]] = []
    for start, size in runs:
        if size and merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        elif size:
            merged.append((start, size))
    return tuple(merged)


def item_count(runs: Runs) -> int:
    """Return the total number of items in ``runs``."""
    return sum(size for _, size in runs)


def intersect_runs(a: Runs, b: Runs) -> Runs:
    """Return the runs, (start, size), of the items that are in both ``a`` and ``b``.

    ((0, 4),) and ((2, 4),) give ((2, 2),). So ranks find what a change of split has to send.
    """
    overlaps, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        (x, m), (y, n) = a[i], b[j]
        start, stop = max(x, y), min(x + m, y + n)
        if start < stop:
            overlaps.append((start, stop - start))
        if x + m < y + n:  # the run that ends first overlaps nothing further
            i += 1
        else:
            j += 1
    return tuple(overlaps)


# -- text and arguments ----------------------------------------------------------------------------

_WORD = r"(?:blocks|cut|sizes|of)\s*=\s*(?:\d+|'\w+'|\"\w+\"|\(\s*\d+\s*(?:,\s*\d+\s*)*,?\s*\))"
CUT_PATTERN = rf"(?:\s*,\s*{_WORD})*"
"""Pattern of the arguments after the dim in the text of a split, such as ``, blocks=2``."""


def cut_of(blocks: Any = None, cut: Any = None, sizes: Any = None, of: Any = None) -> DimCut | None:
    """Return the ``DimCut`` for these arguments of ``S(dim, ...)``; None for a balanced split.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is negative, ``cut`` is unknown, or two of ``blocks``, ``cut`` and
            ``sizes`` are given.
    """
    names = [name for name, x in (("blocks", blocks), ("cut", cut), ("sizes", sizes))
             if x is not None]  # fmt: skip
    if len(names) > 1:
        raise ValueError(
            f"split: {' and '.join(f'{name}=' for name in names)} are given, and a dim is cut in "
            "one way. Give one of them; of= goes with each."
        )
    if cut is not None and cut != ZIGZAG:
        raise ValueError(
            f'split: cut={cut!r} is not known. Write cut="{ZIGZAG}", or blocks=, sizes= or of=.'
        )
    blocks = None if blocks is None else _check_size("blocks", blocks, 1)
    sizes = (
        None
        if sizes is None
        else tuple(_check_size("sizes", x, 0) for x in _check_sequence(sizes, "sizes"))
    )
    if of is not None:
        is_one = isinstance(of, int)
        of = (
            _check_size("of", of, 1)
            if is_one
            else tuple(_check_size("of", x, 0) for x in _check_sequence(of, "of"))
        )
    if (blocks, cut, sizes, of) == (None, None, None, None):
        return None
    return DimCut(blocks, cut is not None, sizes, of)


def _check_sequence(value: Any, name: str) -> Any:
    if isinstance(value, tuple | list) and value:
        return value
    raise TypeError(f"split: {name}={value!r}. Give a tuple of sizes, such as {name}=(3, 5).")


def _check_size(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"split: {name} holds {value!r} of type {type(value).__name__}, and a number of items "
            "is an int."
        )
    if value < minimum:
        raise ValueError(
            f"split: {name} holds {value}, and a number of items is {minimum} or more here."
        )
    return value


def parse_cut(text: str) -> DimCut | None:
    """Return the cut that prints as ``text``, such as ``", blocks=2"``; None if the text is empty.

    ``text`` must match the pattern ``CUT_PATTERN``.
    """
    arguments: dict[str, Any] = {}
    # The pattern of a value is what follows "=" and the three characters "\s*" in _WORD.
    for name, value in re.findall(rf"(\w+)\s*=\s*({_WORD.partition('=')[2][3:]})", text):
        numbers = [int(x) for x in re.findall(r"\d+", value)]
        arguments[name] = (
            value[1:-1] if value[0] in "'\"" else tuple(numbers) if value[0] == "(" else numbers[0]
        )
    return cut_of(**arguments)
