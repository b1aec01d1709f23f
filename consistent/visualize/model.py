"""Picture of a model: the layout of each parameter, and how many bytes of it a rank holds."""

from __future__ import annotations

import textwrap

from torch import nn

from mirrored.readable import on_one_line

from ..drawing.pictures.colours import PALETTE, paint
from ..drawing.pictures.drawing import Box, Drawing, Words
from ..drawing.pictures.picture import Picture, wrapped
from ..spec.bytes_text import bytes_text
from .holdings import share_text
from .model_tree import Branch, PictureRow, rows, tree_of

_FEW_RANKS = 8
_MAX_ROWS = 120  # in a drawing
_LINE_HEIGHT = 20.0
_BAR_WIDTH = 130.0
_LEGEND = ((0, "split"), (8, "whole on every rank"), (1, "addends"))


class ModelPicture(Picture):
    """Picture of a module's parameters and buffers, by submodule, with their layouts and bytes.

    Layers with the same structure and the same layouts share one line.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tree: Branch = tree_of(module)

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        picture_rows = list(rows(self.tree))
        cells = [_row_cells(row) for row in picture_rows]
        head = ("", "", "layout", "rank holds", "of")
        widths = [max(len(head[i]), *(len(row[i]) for row in cells)) for i in range(5)]
        shapes = max((len(row.shape) for row in picture_rows if row.entry is not None), default=0)
        excess = sum(widths) + 2 * 4 - width
        # Where the text is too wide, columns shrink in this order, each to a minimum width: kinds
        # of modules first, then layouts, then names; then once more, to smaller minimums.
        for column, least in ((1, max(shapes, 12)), (2, 22), (0, 24), (1, 12), (2, 12), (0, 16)):
            reduction = max(0, min(excess, widths[column] - least))
            widths[column] -= reduction
            excess -= reduction
        lines = [*wrapped(self.summary(), width), "", _text_line(head, widths, blocks)]
        for row, row_cells in zip(picture_rows, cells, strict=True):
            style = "bold" if row.entry is None else _layout_style(row)
            lines.append(paint(_text_line(row_cells, widths, blocks), style, colour))
        lines += ["", *wrapped(self.totals(), width)]
        return "\n".join(line.rstrip() for line in lines)

    def summary(self) -> str:
        """Return a sentence with the number of parameters and their placements."""
        placements = self.tree.placements
        where = (
            "plain tensors, whole on every rank"
            if not placements
            else f"on {placements[0]}"
            if len(placements) == 1
            else f"on {len(placements)} placements"
        )
        return f"{on_one_line(self.tree.kind)}: {self.tree.parameters:,} parameters, {where}"

    def totals(self) -> str:
        """Return a sentence with the bytes of the whole model and those that a rank holds."""
        whole = self.tree.nbytes
        ranks = sorted({int(r) for p in self.tree.placements for r in p.ranks.ravel()[:_FEW_RANKS]})
        bytes_by_rank = {rank: self.tree.held_by(rank) for rank in ranks[:_FEW_RANKS]}
        if not bytes_by_rank:
            return f"Every rank holds all of it: {bytes_text(whole)}."
        most = self.tree.held
        share = f" ({share_text(most / whole)})" if whole else ""
        text = f"A rank holds at most {bytes_text(most)} of {bytes_text(whole)}{share}."
        if len(set(bytes_by_rank.values())) > 1:
            rank_texts = ", ".join(f"{rank}: {bytes_text(n)}" for rank, n in bytes_by_rank.items())
            text += f" By rank: {rank_texts}{', ...' if len(ranks) > len(bytes_by_rank) else '.'}"
        return text

    def drawing(self) -> Drawing:
        picture_rows = list(rows(self.tree))
        drawn_rows = picture_rows[:_MAX_ROWS]
        names = max((18 * r.depth + 7.2 * len(_row_name(r)) for r in drawn_rows), default=0)
        columns = (20.0, max(180.0, 36 + names))
        shape = columns[1] + 150
        layout = shape + max(96.0, 16 + 6.6 * max(len(r.layout) for r in drawn_rows))
        bar, held, width = layout, layout + _BAR_WIDTH + 12, layout + _BAR_WIDTH + 150
        shapes: list[Box | Words] = []
        y = 36.0
        for i, line in enumerate(textwrap.wrap(self.summary(), int(width / 8.2))):
            shapes.append(Words(20, y, line, 14, bold=i == 0))
            y += 20
        head = (("shape", columns[1]), ("layout", shape), ("a rank holds, of the whole", bar))
        shapes += [Words(x, y + 14, text, 11, "faint") for text, x in head]
        y += 26
        for row in drawn_rows:
            shapes += _row_shapes(row, (*columns, shape, bar, held), y)
            y += _LINE_HEIGHT
        if len(picture_rows) > len(drawn_rows):
            shapes.append(
                Words(
                    20,
                    y + 13,
                    f"... and {len(picture_rows) - len(drawn_rows)} lines more",
                    11,
                    "faint",
                )
            )
            y += _LINE_HEIGHT
        y += 8
        for line in textwrap.wrap(self.totals(), int(width / 7)):
            shapes.append(Words(20, y + 13, line, 12))
            y += _LINE_HEIGHT
        shapes += _legend(y)
        return Drawing(width, y + 36, shapes, self.summary())


def _row_shapes(
    row: PictureRow, columns: tuple[float, float, float, float, float], y: float
) -> list[Box | Words]:
    """Return the shapes of a row's line in the drawing, at height ``y``.

    ``columns`` are the left ends of its name, shape, layout, bar, and number of bytes.
    """
    name, shape, layout, bar, held = columns
    bold = row.entry is None
    ink = "ink" if bold or row.nbytes else "faint"
    shapes: list[Box | Words] = [
        Words(name + 18 * row.depth, y + 13, _row_name(row), 12, ink, bold=bold),
        Words(shape, y + 13, row.shape, 11, "faint"),
        Words(layout, y + 13, row.layout, 11, ink),
        *_bar(row, bar, y + 4, _BAR_WIDTH),
    ]
    if row.nbytes:
        text = f"{bytes_text(row.held)} of {bytes_text(row.nbytes)}"
        shapes.append(Words(held, y + 13, text, 10, "faint"))
    return shapes


def _legend(y: float) -> list[Box | Words]:
    """Return the legend of the bars at height ``y`` of the drawing."""
    x, shapes = 20.0, list[Box | Words]()
    for style, word in _LEGEND:
        shapes += [
            Box(x, y + 4, 11, 11, PALETTE[style]),
            Words(x + 17, y + 13, word, 11, "faint"),
        ]
        x += 40 + 6.4 * len(word)
    return shapes


def _row_cells(row: PictureRow) -> tuple[str, ...]:
    name = "  " * row.depth + _row_name(row)
    numbers = (bytes_text(row.held), bytes_text(row.nbytes)) if row.nbytes else ("", "")
    return (*map(on_one_line, (name, row.shape, row.layout)), *numbers)


def _row_name(row: PictureRow) -> str:
    return f"{row.name} (x{row.times})" if row.times > 1 else row.name


def _text_line(cells: tuple[str, ...], widths: list[int], blocks: bool) -> str:
    dots = "…" if blocks else "..."
    parts = []
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        cell = cell if len(cell) <= width else cell[: width - len(dots)] + dots
        parts.append(cell.rjust(width) if i > 2 else cell.ljust(width))
    return "  ".join(parts)


def _layout_style(row: PictureRow) -> int | None:
    """Return the index of the colour that stands for the layout of a row's tensor.

    It is used in the terminal and in the drawing: 0 split, 1 addends, 8 whole. None stands for a
    module, a plain tensor, or a tensor that is tied to another.
    """
    spec = row.entry.spec if row.entry is not None else None
    if spec is None or row.entry is None or row.entry.tied:
        return None
    splits = [entry for entry in spec.sbp if entry.is_split]
    return 0 if splits else 1 if any(entry.is_partial for entry in spec.sbp) else 8


def _bar(row: PictureRow, x: float, y: float, width: float) -> list[Box | Words]:
    """Return a bar for a row: pale for the whole tensor, in colour the share that a rank holds.

    Its left upper corner is at (``x``, ``y``), and the pale bar is ``width`` pixels long.
    """
    if not row.nbytes:
        return []
    style = _layout_style(row)
    fill = "faint" if row.entry is None else PALETTE[8 if style is None else style]
    title = f"a rank holds {row.held:,} of {row.nbytes:,} bytes"
    share = max(1.0, width * row.held / row.nbytes)
    return [Box(x, y, width, 11, "empty", "line"), Box(x, y, share, 11, fill, title=title)]
