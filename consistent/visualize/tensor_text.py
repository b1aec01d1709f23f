"""Text picture of a tensor on its ranks: for each rank a miniature of the tensor, with the rank's
part filled.

```
f32[8, 6] (S(0), B) on placement("cpu", ranks=[[0, 1], [2, 3]])
dim 0 from top to bottom, dim 1 from left to right

            axis 1 = 0  axis 1 = 1
axis 0 = 0  rank 0      rank 1
            ██████████  ██████████
            ··········  ··········
            [0:4, :]    [0:4, :]
            copy 1/2    copy 2/2
            96 B        96 B
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..drawing.pictures.colours import Style, paint
from ..drawing.pictures.picture import wrapped
from ..spec import Coordinate, TensorSpec
from ..spec.bytes_text import bytes_text
from .holdings import RankPart, drawn_dims, rank_part, sentences, shown_indices, spans

WIDE, HIGH = 10, 4  # size of a miniature, in characters
_GAP = 2
_MAX_LINES = 4  # maximum lines of ranks in a block
_MAX_BLOCKS = 3
_MAX_REGION = 26  # maximum characters of a region

_RankText = Sequence[tuple[str, Style]]  # the lines of one rank: text, and its style


def tensor_text(spec: TensorSpec, colour: bool, width: int, blocks: bool) -> str:
    """Return the picture of a tensor of ``spec`` as text, at most ``width`` characters wide.

    ``blocks`` allows characters beyond ASCII, and ``colour`` terminal colours.
    """
    out = _title(spec, width)
    fill = "█▒·" if blocks else "#/."
    for block in _block_coordinates(spec):
        out += ["", *([block_name(spec, block)] if block else [])]
        out += _block_lines(spec, block, colour, width, fill)
    out += ["", *itertools.chain.from_iterable(wrapped(line, width) for line in sentences(spec))]
    return "\n".join(line.rstrip() for line in out)


def block_name(spec: TensorSpec, outer: Sequence[int | None]) -> str:
    """Return the heading of a block of ranks, such as ``axis 0 = 1, axis 1 = 0``.

    A block shows the ranks that differ in the last two axes only. ``outer`` are their coordinates
    in the axes before these.
    """
    if None in outer:
        return "..."
    return ", ".join(f"{axis_name(spec, a)} = {k}" for a, k in enumerate(outer))


def axis_name(spec: TensorSpec, axis: int) -> str:
    """Return the placement's name of ``axis``, or ``axis 0`` if axes have no names."""
    names = spec.placement.axes
    return names[axis] if names else f"axis {axis}"


def direction(spec: TensorSpec) -> str:
    """Return a text that says how the dims of the tensor lie in its picture.

    Example: ``dim 0 from top to bottom, dim 1 from left to right``.
    """
    dims = drawn_dims(spec)
    if not dims:
        return "one element"
    if len(dims) == 1:
        return f"dim {dims[0]} from left to right"
    return f"dim {dims[0]} from top to bottom, dim {dims[1]} from left to right"


def _title(spec: TensorSpec, width: int) -> list[str]:
    return [*wrapped(repr(spec), width), *wrapped(direction(spec), width)]


def _block_coordinates(spec: TensorSpec) -> Iterator[tuple[int | None, ...]]:
    """Yield the coordinates of each block of ranks, in the axes before the last two.

    ``(None,)`` stands for blocks that are left out, if there are many.
    """
    outer = spec.placement.shape[:-2]
    count = 1
    for n in outer:
        count *= n
    for index in shown_indices(count, _MAX_BLOCKS):
        if index is None:
            yield (None,)
            continue
        coordinate = []
        for n in reversed(outer):
            coordinate.append(index % n)
            index //= n
        yield tuple(reversed(coordinate))


def _block_lines(
    spec: TensorSpec, outer: Sequence[int | None], colour: bool, width: int, fill: str
) -> list[str]:
    """Return the text lines of the ranks whose coordinates begin with ``outer``.

    ``fill`` has the three characters of ``miniature``.
    """
    if None in outer:
        return []
    base: Coordinate = tuple(k for k in outer if k is not None)
    grid = spec.placement.shape[len(base) :]
    if len(grid) == 1:
        return _lines_of_ranks(spec, grid[0], colour, width, fill)
    names = [axis_name(spec, len(base) + k) for k in range(2)]
    rows = shown_indices(grid[0], _MAX_LINES)
    margin = max(len(f"{names[0]} = {grid[0] - 1}"), 3) + _GAP
    cell = _cell_width(
        spec, (rank_part(spec, (*base, i, grid[1] - 1)) for i in rows if i is not None)
    )
    cell = max(cell, len(f"{names[1]} = {grid[1] - 1}"))
    columns = shown_indices(grid[1], max(1, (width - margin) // (cell + _GAP)))
    heads: list[_RankText] = [
        [("..." if j is None else f"{names[1]} = {j}", "bold")] for j in columns
    ]
    out = _side_by_side("", heads, margin, cell, colour)
    for i in rows:
        if i is None:
            out += ["", "...", ""]
            continue
        cells = [
            [("...", "dim")]
            if j is None
            else _rank_text(spec, rank_part(spec, (*base, i, j)), fill)
            for j in columns
        ]
        out += [*_side_by_side(f"{names[0]} = {i}", cells, margin, cell, colour), ""]
    return out[:-1]


def _lines_of_ranks(spec: TensorSpec, n: int, colour: bool, width: int, fill: str) -> list[str]:
    """Return the text lines for a placement of one axis with ``n`` ranks.

    As many ranks are side by side as fit in ``width``.
    """
    cell = _cell_width(spec, (rank_part(spec, (k,)) for k in (0, n - 1)))
    per_line = max(1, (width + _GAP) // (cell + _GAP))
    cells = [
        [("...", "dim")] if k is None else _rank_text(spec, rank_part(spec, (k,)), fill)
        for k in shown_indices(n, per_line * _MAX_LINES)
    ]
    out: list[str] = []
    for start in range(0, len(cells), per_line):
        out += [*_side_by_side("", cells[start : start + per_line], 0, cell, colour), ""]
    return out[:-1]


def _cell_width(spec: TensorSpec, parts: Iterator[RankPart]) -> int:
    """Return the width, in characters, of the text of one rank.

    ``parts`` are those of the ranks whose regions have the most digits.
    """
    longest = [min(_MAX_REGION, max(len(h.region), len(h.role))) for h in parts]
    return max([WIDE, *longest])


def _rank_text(spec: TensorSpec, rank_part: RankPart, fill: str) -> _RankText:
    """Return the text of one rank, line by line.

    It has the rank's number, its small picture of the tensor, its region and bytes. ``fill`` has
    the three characters of ``miniature``.
    """
    style = rank_part.piece
    picture: _RankText = [(row, style) for row in miniature(spec, rank_part, fill)]
    texts = [rank_part.region, rank_part.role, bytes_text(rank_part.nbytes)]
    below: _RankText = [(text, None) for text in texts if text]
    return [(f"rank {rank_part.rank}", "bold"), *picture, *below]


def miniature(spec: TensorSpec, held: RankPart, fill: str) -> list[str]:
    """Return a picture of the tensor of a few characters, with the part ``held`` by a rank filled.

    The result has a string for each line. ``fill`` has three characters: for held elements, for
    addends, and for the rest, such as "#/.".
    """
    dims = drawn_dims(spec)
    across = dims[-1] if dims else None
    down = dims[0] if len(dims) == 2 else None
    full, addend, rest = fill
    mark = rest if held.is_empty else addend if held.is_addend else full
    high = HIGH if down is not None else 1
    rows = {i for run in spans(spec, held, down) for i in _covered_indices(*run, high)}
    columns = {j for run in spans(spec, held, across) for j in _covered_indices(*run, WIDE)}
    return [
        "".join(mark if i in rows and j in columns else rest for j in range(WIDE))
        for i in range(high)
    ]


def _covered_indices(begin: float, end: float, count: int) -> range:
    """Return the indices of the characters that show the part [begin, end) of a line.

    The line has ``count`` characters. ``begin`` and ``end`` are fractions from 0 to 1; the result
    has at least one index. Example: (0.5, 1.0, 10) gives 5 to 9.
    """
    first = round(begin * count)
    last = max(round(end * count), first + 1)
    return range(min(first, count - 1), last)


def _side_by_side(
    name: str, cells: Sequence[_RankText], margin: int, cell: int, colour: bool
) -> list[str]:
    """Return the texts of several ranks side by side, line by line.

    Args:
        name: text in the margin of the first line.
        cells: the text of each rank.
        margin, cell: width of the margin and of each rank's text, in characters.
        colour: whether to add terminal colours.
    """
    lines = []
    for i in range(max(map(len, cells))):
        parts = [paint((name if i == 0 else "").ljust(margin), "bold", colour)]
        for rank_lines in cells:
            text, style = rank_lines[i] if i < len(rank_lines) else ("", None)
            text = text if len(text) <= cell else text[: cell - 3] + "..."
            parts.append(paint(text, style, colour) + " " * (cell + _GAP - len(text)))
        lines.append("".join(parts))
    return lines
