"""Bar chart of the peak memory of each simulated rank, divided by kind of memory."""

from __future__ import annotations

from collections.abc import Mapping

from ...drawing.pictures.colours import PALETTE
from ...drawing.pictures.drawing import Box, Drawing, Words
from ...drawing.pictures.picture import Picture
from ...spec.bytes_text import bytes_text
from ..simulation.peak_memory import KINDS, Peak

_ROW, _LEFT, _WIDTH = 26.0, 96.0, 640.0
_FILLS: dict[str, str] = dict(zip(KINDS, PALETTE, strict=False))
_MARKS: dict[str, str] = dict(zip(KINDS, "PGOAB", strict=True))


class MemoryPicture(Picture):
    """Bar chart of the most memory that each simulated rank holds during a step.

    Args:
        peaks: peak by rank, as reported by a simulation.
        limit: bytes of memory of a device.
    """

    def __init__(self, peaks: Mapping[int, Peak], limit: float | None = None) -> None:
        self.peaks, self.limit = dict(sorted(peaks.items())), limit

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        room = max(10, width - 24)
        lines = [self._head()]
        for rank, peak in self.peaks.items():
            parts = [_MARKS[k] * round(room * peak.kinds.get(k, 0) / self._most()) for k in KINDS]
            lines.append(f"rank {rank:<6} {bytes_text(peak.bytes):>9} {''.join(parts)}")
        lines.append("; ".join(f"{_MARKS[k]} {k}" for k in self._kinds()))
        return "\n".join(lines)

    def drawing(self) -> Drawing:
        scale = _WIDTH / self._most()
        shapes: list[Box | Words] = [Words(20, 30, self._head(), 14, bold=True)]
        top = y = 50.0
        for rank, peak in self.peaks.items():
            x = _LEFT
            shapes.append(Words(20, y + 15, f"rank {rank}", 12))
            for kind in KINDS:
                long = peak.kinds.get(kind, 0) * scale
                if long:
                    said = f"{kind}: {bytes_text(peak.kinds[kind])}"
                    shapes.append(Box(x, y, long, _ROW - 6, _FILLS[kind], title=said))
                x += long
            shapes.append(Words(x + 8, y + 15, bytes_text(peak.bytes), 11, "faint"))
            y += _ROW
        # A distant limit would shrink all bars.
        if self.limit is not None and self._limit_is_near():
            x = _LEFT + self.limit * scale
            shapes.append(Box(x, top - 6, 1.5, y - top + 6, "#cf222e"))
            words = f"a device has {bytes_text(self.limit)}"
            shapes.append(Words(x - 6, y + 18, words, 11, "#cf222e", "end"))
        x = _LEFT
        for kind in self._kinds():
            shapes.append(Box(x, y + 30, 12, 12, _FILLS[kind]))
            shapes.append(Words(x + 18, y + 40, kind, 11, "faint"))
            x += 40 + 6.4 * len(kind)
        return Drawing(_LEFT + _WIDTH + 90, y + 56, shapes, self._head())

    def _most(self) -> float:
        held = max((peak.bytes for peak in self.peaks.values()), default=0)
        return float(max(held, self.limit if self.limit and self._limit_is_near() else 0, 1))

    def _limit_is_near(self) -> bool:
        held = max((peak.bytes for peak in self.peaks.values()), default=0)
        return self.limit is not None and self.limit <= 4 * held

    def _kinds(self) -> list[str]:
        return [k for k in KINDS if any(k in peak.kinds for peak in self.peaks.values())]

    def _head(self) -> str:
        most = max((peak.bytes for peak in self.peaks.values()), default=0)
        return f"Memory at its peak, by rank: at most {bytes_text(most)}"
