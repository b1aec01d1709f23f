"""Bar chart of the choices that a search tried, with the seconds of a step as length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...drawing.pictures.colours import PALETTE
from ...drawing.pictures.drawing import Box, Drawing, Words
from ...drawing.pictures.picture import Picture
from ...drawing.words import seconds_text
from ...spec.bytes_text import bytes_text

_MAX_BARS = 16  # bars at most
_ROW, _WIDTH = 24.0, 420.0
_SIMULATED, _ESTIMATED = PALETTE[2], "line"


class Bar(Protocol):
    """Protocol of what a chart shows as one bar: a choice that a search has tried.

    ``strategies.search.Tried`` is one. ``report`` is None if its seconds are only estimated.
    """

    @property
    def choice(self) -> object: ...
    @property
    def seconds(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def report(self) -> object | None: ...


class CostsPicture(Picture):
    """Bar chart of the strategies that a search tried: the seconds of a step, the fastest first.

    Args:
        name: name of the search in the head line.
        tried: the choices that fit the memory.
    """

    def __init__(self, name: str, tried: Sequence[Bar]) -> None:
        self.name, self.tried = name, list(tried)

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        max_seconds = max((t.seconds for t in self._shown_bars()), default=0.0)
        mark, bar_width = "█" if blocks else "#", max(8, width // 4)
        lines = [self._title()]
        for t in self._shown_bars():
            bar = (mark * max(1, round(bar_width * t.seconds / max_seconds))).ljust(bar_width)
            size = f"{seconds_text(t.seconds):>8} {bytes_text(t.nbytes):>9}"
            lines.append(f"{size} {bar} {t.choice}{'' if t.report else ' (estimated)'}"[:width])
        return "\n".join(lines)

    def drawing(self) -> Drawing:
        shown = self._shown_bars()
        names = [str(t.choice) for t in shown]
        left = 36 + 6.3 * max(map(len, names), default=0)
        max_seconds = max((t.seconds for t in shown), default=1.0)
        shapes: list[Box | Words] = [Words(20, 30, self._title(), 14, bold=True)]
        y = 50.0
        for name, t in zip(names, shown, strict=True):
            length = _WIDTH * t.seconds / max_seconds
            fill = _ESTIMATED if t.report is None else _SIMULATED
            label = f"{seconds_text(t.seconds)}, {bytes_text(t.nbytes)} a rank"
            shapes.append(Words(left - 12, y + 14, name, 12, anchor="end"))
            shapes.append(Box(left, y, length, _ROW - 6, fill, title=label))
            shapes.append(Words(left + length + 8, y + 14, label, 11, "faint"))
            y += _ROW
        for fill, words, x in (
            (_SIMULATED, "simulated as a whole step", left),
            (_ESTIMATED, "estimated from its parts", left + 190),
        ):
            shapes.append(Box(x, y + 8, 12, 12, fill))
            shapes.append(Words(x + 18, y + 18, words, 11, "faint"))
        width = max(left + _WIDTH + 190, 40 + 8.2 * len(self._title()))
        return Drawing(width, y + 34, shapes, self._title())

    def _shown_bars(self) -> list[Bar]:
        return self.tried[:_MAX_BARS]

    def _title(self) -> str:
        more = len(self.tried) - len(self._shown_bars())
        return f"{self.name}: seconds of a step" + (f"; {more} slower ones" if more else "")
