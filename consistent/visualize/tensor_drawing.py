"""Drawing of a tensor on its ranks: the grid of ranks, each with a miniature of the tensor."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from ..drawing.pictures.colours import colour
from ..drawing.pictures.drawing import Box, Drawing, Words
from ..spec import TensorSpec
from ..spec.bytes_text import bytes_text
from .holdings import RankPart, drawn_dims, rank_part, sentences, shown_indices, spans
from .tensor_text import axis_name, direction

# Pixels of a rank's cell: width, and height without the miniature.
_CELL_WIDTH, _ROW_HEIGHT = 132.0, 88.0
_MAX_WIDTH, _MAX_HEIGHT = 104.0, 72.0  # maximum width and height of a miniature, in pixels
_MAX_COLUMNS, _MAX_ROWS = 8, 6
_MARGIN = 20.0
_LETTER_WIDTH = 6.2  # average width of a letter of a 12-pixel font, in pixels
_MAX_DRAWING_WIDTH = 680.0  # a picture of few ranks grows up to this many pixels before text wraps


def tensor_drawing(spec: TensorSpec) -> Drawing:
    """Return the drawing of a tensor of ``spec`` on its ranks.

    For a placement of three axes or more, only the ranks at the origin of the outer axes are drawn.
    """
    grid = spec.placement.shape
    is_grid = len(grid) > 1
    rows = shown_indices(grid[-2], _MAX_ROWS) if is_grid else [0]
    columns = shown_indices(grid[-1], _MAX_COLUMNS)
    left = _MARGIN + (92.0 if is_grid else 0.0)
    head, _, where = repr(spec).partition(" on ")
    texts = sentences(spec)
    longest = max(map(len, (f"on {where}", *texts)))
    width = max(
        left + len(columns) * _CELL_WIDTH + _MARGIN,
        min(2 * _MARGIN + longest * _LETTER_WIDTH, _MAX_DRAWING_WIDTH),
        460.0,
    )
    line_length = int((width - 2 * _MARGIN) / _LETTER_WIDTH)
    shapes, y = _heading(spec, head, where, line_length)
    if is_grid:
        shapes += _names_of_columns(spec, columns, left, y)
        y += 22
    for i in rows:
        if i is None:
            shapes.append(Words(left, y + 14, "…", 16, "faint"))
            y += 30
            continue
        if is_grid:
            shapes.append(
                Words(_MARGIN, y + 14, f"{axis_name(spec, len(grid) - 2)} = {i}", 11, "faint")
            )
        outer = (0,) * (len(grid) - 2) + ((i,) if is_grid else ())
        for j, index in enumerate(columns):
            if index is None:
                shapes.append(Words(left + j * _CELL_WIDTH + 24, y + 60, "…", 20, "faint"))
            else:
                shapes += _rank_shapes(
                    spec, rank_part(spec, (*outer, index)), left + j * _CELL_WIDTH, y
                )
        y += _row_height(spec)
    for text in texts:
        for line in textwrap.wrap(text, line_length, subsequent_indent="   "):
            shapes.append(Words(_MARGIN, y + 12, line, 12))
            y += 18
    return Drawing(width, y + _MARGIN, shapes, repr(spec))


def _heading(
    spec: TensorSpec, head: str, where: str, line_length: int
) -> tuple[list[Box | Words], float]:
    """Return the words above the ranks of the drawing, and the height ``y`` below them.

    Args:
        head, where: text of the tensor (dtype, shape, SBP), and of its placement.
        line_length: number of letters that fit in a line.
    """
    y = _MARGIN + 6
    shapes: list[Box | Words] = [Words(_MARGIN, y + 8, head, 15, bold=True)]
    for line in textwrap.wrap(f"on {where}", line_length, subsequent_indent="   "):
        y += 19
        shapes.append(Words(_MARGIN, y + 8, line, 12))
    y += 20
    shapes.append(Words(_MARGIN, y + 6, _direction_note(spec), 11, "faint"))
    return shapes, y + 24


def _names_of_columns(
    spec: TensorSpec, columns: Sequence[int | None], left: float, y: float
) -> list[Words]:
    """Return the words above the columns of ranks, such as ``tp = 0``."""
    name = axis_name(spec, spec.placement.ndim - 1)
    texts = ("…" if index is None else f"{name} = {index}" for index in columns)
    return [
        Words(left + j * _CELL_WIDTH, y + 12, text, 11, "faint") for j, text in enumerate(texts)
    ]


def _direction_note(spec: TensorSpec) -> str:
    outer = spec.placement.shape[:-2]
    if not outer:
        return direction(spec)
    first = ", ".join(f"{axis_name(spec, a)} = 0" for a in range(len(outer)))
    return f"{direction(spec)}; the ranks at {first}"


def _miniature_size(spec: TensorSpec) -> tuple[float, float]:
    """Return (width, height) of the small rectangle that stands for the tensor on each rank.

    They are in the ratio of the two dims that are drawn, within limits.
    """
    dims = drawn_dims(spec)
    if len(dims) < 2:
        return _MAX_WIDTH, 22.0
    high, wide = (max(1, spec.shape[dim]) for dim in dims)
    ratio = min(max(high / wide, 0.35), 1.6)
    height = min(_MAX_WIDTH * ratio, _MAX_HEIGHT)
    return min(_MAX_WIDTH, max(height / ratio, 56.0)), height


def _row_height(spec: TensorSpec) -> float:
    role = 15.0 if rank_part(spec, (0,) * spec.placement.ndim).role else 0.0
    return _ROW_HEIGHT + role + _miniature_size(spec)[1]


def _rank_shapes(
    spec: TensorSpec, rank_part: RankPart, x: float, y: float
) -> Sequence[Box | Words]:
    width, height = _miniature_size(spec)
    dims = drawn_dims(spec)
    across = spans(spec, rank_part, dims[-1] if dims else None)
    down = spans(spec, rank_part, dims[0] if len(dims) == 2 else None)
    box_y = y + 22
    shapes: list[Box | Words] = [
        Words(x, y + 14, f"rank {rank_part.rank}", 12, bold=True),
        Box(x, box_y, width, height, "empty", "line"),
    ]
    for (left, right), (top, bottom) in (
        () if rank_part.is_empty else itertools.product(across, down)
    ):
        part = (
            x + left * width,
            box_y + top * height,
            (right - left) * width,
            (bottom - top) * height,
        )
        title = f"rank {rank_part.rank} holds {rank_part.region}, {bytes_text(rank_part.nbytes)}"
        shapes.append(Box(*part, colour(rank_part.piece), "", rank_part.is_addend, title))
    size = min(11.0, 11.0 * (_CELL_WIDTH - 8) / max(1.0, len(rank_part.region) * 6.2))
    for text, ink in (
        (rank_part.region, "ink"),
        (rank_part.role, "ink"),
        (bytes_text(rank_part.nbytes), "faint"),
    ):
        if text:
            box_y += 15
            shapes.append(
                Words(x, box_y + height, text, size if text is rank_part.region else 11, ink)
            )
    return shapes
