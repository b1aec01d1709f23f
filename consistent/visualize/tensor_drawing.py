"""Drawing of a tensor on its ranks: the grid of ranks, each with a miniature of the tensor."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from ..drawing.pictures.colours import colour
from ..drawing.pictures.drawing import Box, Drawing, Words
from ..spec import TensorSpec
from ..spec.bytes_text import bytes_text
from .holdings import RankPart, drawn_dims, holding, sentences, shown, spans
from .tensor_text import axis_name, direction

_CELL, _ROW = 132.0, 88.0  # pixels of a rank's cell: width, and height without the miniature
_WIDE, _HIGH = 104.0, 72.0  # maximum width and height of a miniature, in pixels
_MOST_COLUMNS, _MOST_ROWS = 8, 6
_EDGE = 20.0
_LETTER = 6.2  # average width of a letter of a 12-pixel font, in pixels
_MOST_WIDE = 680.0  # a picture of few ranks grows up to this many pixels before text wraps


def tensor_drawing(spec: TensorSpec) -> Drawing:
    """Return the drawing of a tensor of ``spec`` on its ranks.

    For a placement of three axes or more, only the ranks at the origin of the outer axes are drawn.
    """
    grid = spec.placement.shape
    named = len(grid) > 1
    rows = shown(grid[-2], _MOST_ROWS) if named else [0]
    columns = shown(grid[-1], _MOST_COLUMNS)
    left = _EDGE + (92.0 if named else 0.0)
    head, _, where = repr(spec).partition(" on ")
    told = sentences(spec)
    longest = max(map(len, (f"on {where}", *told)))
    width = max(
        left + len(columns) * _CELL + _EDGE,
        min(2 * _EDGE + longest * _LETTER, _MOST_WIDE),
        460.0,
    )
    room = int((width - 2 * _EDGE) / _LETTER)
    shapes, y = _heading(spec, head, where, room)
    if named:
        shapes += _names_of_columns(spec, columns, left, y)
        y += 22
    for i in rows:
        if i is None:
            shapes.append(Words(left, y + 14, "…", 16, "faint"))
            y += 30
            continue
        if named:
            shapes.append(
                Words(_EDGE, y + 14, f"{axis_name(spec, len(grid) - 2)} = {i}", 11, "faint")
            )
        outer = (0,) * (len(grid) - 2) + ((i,) if named else ())
        for j, index in enumerate(columns):
            if index is None:
                shapes.append(Words(left + j * _CELL + 24, y + 60, "…", 20, "faint"))
            else:
                shapes += _cell(spec, holding(spec, (*outer, index)), left + j * _CELL, y)
        y += _row_height(spec)
    for text in told:
        for line in textwrap.wrap(text, room, subsequent_indent="   "):
            shapes.append(Words(_EDGE, y + 12, line, 12))
            y += 18
    return Drawing(width, y + _EDGE, shapes, repr(spec))


def _heading(spec: TensorSpec, head: str, where: str, room: int) -> tuple[list[Box | Words], float]:
    """Return the words above the ranks of the drawing, and the height ``y`` below them.

    Args:
        head, where: text of the tensor (dtype, shape, SBP), and of its placement.
        room: number of letters that fit in a line.
    """
    y = _EDGE + 6
    shapes: list[Box | Words] = [Words(_EDGE, y + 8, head, 15, bold=True)]
    for line in textwrap.wrap(f"on {where}", room, subsequent_indent="   "):
        y += 19
        shapes.append(Words(_EDGE, y + 8, line, 12))
    y += 20
    shapes.append(Words(_EDGE, y + 6, _note(spec), 11, "faint"))
    return shapes, y + 24


def _names_of_columns(
    spec: TensorSpec, columns: Sequence[int | None], left: float, y: float
) -> list[Words]:
    """Return the words above the columns of ranks, such as ``tp = 0``."""
    name = axis_name(spec, spec.placement.ndim - 1)
    texts = ("…" if index is None else f"{name} = {index}" for index in columns)
    return [Words(left + j * _CELL, y + 12, text, 11, "faint") for j, text in enumerate(texts)]


def _note(spec: TensorSpec) -> str:
    outer = spec.placement.shape[:-2]
    if not outer:
        return direction(spec)
    first = ", ".join(f"{axis_name(spec, a)} = 0" for a in range(len(outer)))
    return f"{direction(spec)}; the ranks at {first}"


def _sides(spec: TensorSpec) -> tuple[float, float]:
    """Return (width, height) of the small rectangle that stands for the tensor on each rank.

    They are in the ratio of the two dims that are drawn, within limits.
    """
    dims = drawn_dims(spec)
    if len(dims) < 2:
        return _WIDE, 22.0
    high, wide = (max(1, spec.shape[dim]) for dim in dims)
    ratio = min(max(high / wide, 0.35), 1.6)
    height = min(_WIDE * ratio, _HIGH)
    return min(_WIDE, max(height / ratio, 56.0)), height


def _row_height(spec: TensorSpec) -> float:
    role = 15.0 if holding(spec, (0,) * spec.placement.ndim).role else 0.0
    return _ROW + role + _sides(spec)[1]


def _cell(spec: TensorSpec, held: RankPart, x: float, y: float) -> Sequence[Box | Words]:
    width, height = _sides(spec)
    dims = drawn_dims(spec)
    across = spans(spec, held, dims[-1] if dims else None)
    down = spans(spec, held, dims[0] if len(dims) == 2 else None)
    at = y + 22
    shapes: list[Box | Words] = [
        Words(x, y + 14, f"rank {held.rank}", 12, bold=True),
        Box(x, at, width, height, "empty", "line"),
    ]
    for (left, right), (top, bottom) in () if held.is_empty else itertools.product(across, down):
        part = (
            x + left * width,
            at + top * height,
            (right - left) * width,
            (bottom - top) * height,
        )
        title = f"rank {held.rank} holds {held.region}, {bytes_text(held.nbytes)}"
        shapes.append(Box(*part, colour(held.piece), "", held.is_addend, title))
    size = min(11.0, 11.0 * (_CELL - 8) / max(1.0, len(held.region) * 6.2))
    for text, ink in ((held.region, "ink"), (held.role, "ink"), (bytes_text(held.nbytes), "faint")):
        if text:
            at += 15
            shapes.append(Words(x, at + height, text, size if text is held.region else 11, ink))
    return shapes
