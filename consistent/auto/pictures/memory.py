"""Bar chart of the peak memory of each simulated rank, divided by kind of memory."""

from __future__ import annotations

from collections.abc import Mapping

from ...drawing.pictures.colours import PALETTE
from ...drawing.pictures.drawing import Box, Drawing, Words
from ...drawing.pictures.picture import Picture
from ...spec.bytes_text import bytes_text
from ..simulation.peak_memory import MEMORY_KINDS, Peak

_ROW, _LEFT, _WIDTH = 26.0, 96.0, 640.0
_FILLS: dict[str, str] = dict(zip(MEMORY_KINDS, PALETTE, strict=False))
_MARKS: dict[str, str] = dict(zip(MEMORY_KINDS, "PGOAB", strict=True))


class MemoryPicture(Picture):
    """Bar chart of the peak memory of each simulated rank during a step.

    Args:
        peaks: peak by rank, as reported by a simulation.
        limit: bytes of memory of a device.
    """

    def __init__(self, peaks: Mapping[int, Peak], limit: float | None = None) -> None:
        self.peaks, self.limit = dict(sorted(peaks.items())), limit

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        bar_width = max(10, width - 24)
        lines = [self._title()]
        for rank, peak in self.peaks.items():
            parts = [
                _MARKS[k] * round(bar_width * peak.kinds.get(k, 0) / self._scale_bytes())
                for k in MEMORY_KINDS
            ]
            lines.append(f"rank {rank:<6} {bytes_text(peak.bytes):>9} {''.join(parts)}")
        lines.append("; ".join(f"{_MARKS[k]} {k}" for k in self._used_kinds()))
        return "\n".join(lines)

    def drawing(self) -> Drawing:
        scale = _WIDTH / self._scale_bytes()
        shapes: list[Box | Words] = [Words(20, 30, self._title(), 14, bold=True)]
        top = y = 50.0
        for rank, peak in self.peaks.items():
            x = _LEFT
            shapes.append(Words(20, y + 15, f"rank {rank}", 12))
            for kind in MEMORY_KINDS:
                length = peak.kinds.get(kind, 0) * scale
                if length:
                    label = f"{kind}: {bytes_text(peak.kinds[kind])}"
                    shapes.append(Box(x, y, length, _ROW - 6, _FILLS[kind], title=label))
                x += length
            shapes.append(Words(x + 8, y + 15, bytes_text(peak.bytes), 11, "faint"))
            y += _ROW
        # A distant limit would shrink all bars.
        if self.limit is not None and self._limit_is_near():
            x = _LEFT + self.limit * scale
            shapes.append(Box(x, top - 6, 1.5, y - top + 6, "#cf222e"))
            words = f"a device has {bytes_text(self.limit)}"
            shapes.append(Words(x - 6, y + 18, words, 11, "#cf222e", "end"))
        x = _LEFT
        for kind in self._used_kinds():
            shapes.append(Box(x, y + 30, 12, 12, _FILLS[kind]))
            shapes.append(Words(x + 18, y + 40, kind, 11, "faint"))
            x += 40 + 6.4 * len(kind)
        return Drawing(_LEFT + _WIDTH + 90, y + 56, shapes, self._title())

    def _scale_bytes(self) -> float:
        peak_bytes = max((peak.bytes for peak in self.peaks.values()), default=0)
        return float(max(peak_bytes, self.limit if self.limit and self._limit_is_near() else 0, 1))

    def _limit_is_near(self) -> bool:
        peak_bytes = max((peak.bytes for peak in self.peaks.values()), default=0)
        return self.limit is not None and self.limit <= 4 * peak_bytes

    def _used_kinds(self) -> list[str]:
        return [k for k in MEMORY_KINDS if any(k in peak.kinds for peak in self.peaks.values())]

    def _title(self) -> str:
        peak_bytes = max((peak.bytes for peak in self.peaks.values()), default=0)
        return f"Memory at its peak, by rank: at most {bytes_text(peak_bytes)}"
