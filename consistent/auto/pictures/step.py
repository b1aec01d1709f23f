"""Timeline chart of a simulated step: a line for each simulated rank, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from ...drawing.pictures.colours import PALETTE
from ...drawing.pictures.drawing import Box, Drawing, Words
from ...drawing.pictures.picture import Picture
from ...drawing.words import seconds_text
from ..simulation.timeline import Span, Timeline

_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of parameters",
    "compute": "compute",
    "boxing": "boxing that the rank waits for",
    "wire": "boxing beside compute",
}
_FILLS = dict(zip(_WORDS, (PALETTE[k] for k in (0, 2, 4, 5, 6, 1, 3)), strict=True))
_MARKS = dict(zip(_WORDS, "FBIW=x-"))
_ROW, _LEFT, _WIDTH = 30.0, 96.0, 900.0
_MIN_GAP = 1.5  # pixels; spans with a smaller gap are drawn as one


class StepPicture(Picture):
    """Timeline chart of what each simulated rank does during a step.

    The lower part of a rank's line shows boxing that runs while it computes.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        row_width = max(10, width - 12)
        lines = [self._title()]
        for rank, track in sorted(self.timeline.tracks.items()):
            row = [" "] * row_width
            for span in track.spans:
                if span.kind == "wire":
                    continue
                a, b = (
                    round(row_width * t / self._total_seconds()) for t in (span.begin, span.end)
                )
                row[a:b] = _MARKS[span.kind] * (b - a)
            lines.append(f"rank {rank:<6} {''.join(row)}".rstrip())
        kinds = [k for k in self._used_kinds() if k != "wire"]
        return "\n".join([*lines, "; ".join(f"{_MARKS[k]} {_WORDS[k]}" for k in kinds)])

    def drawing(self) -> Drawing:
        scale = _WIDTH / self._total_seconds()
        shapes: list[Box | Words] = [Words(20, 30, self._title(), 14, bold=True)]
        y = 48.0
        for rank, track in sorted(self.timeline.tracks.items()):
            shapes.append(Words(20, y + 17, f"rank {rank}", 12))
            shapes.append(Box(_LEFT, y, _WIDTH, _ROW - 6, "empty"))
            has_wire = any(span.kind == "wire" for span in track.spans)
            for kind, begin, end in _merge_spans(track.spans, _MIN_GAP / scale):
                height = (_ROW - 6) * (0.62 if has_wire else 1.0)
                top, span_height = (
                    (y + height, _ROW - 6 - height) if kind == "wire" else (y, height)
                )
                x, length = _LEFT + begin * scale, max((end - begin) * scale, 0.4)
                edge = "paper" if kind in "FBIW" and length > 4 else ""
                label = f"{_WORDS[kind]}: {seconds_text(end - begin)}"
                shapes.append(Box(x, top, length, span_height, _FILLS[kind], edge, title=label))
            y += _ROW
        for k in range(5):
            tick = _LEFT + _WIDTH * k / 4
            words = seconds_text(self._total_seconds() * k / 4) if k else "0"
            shapes.append(Words(tick, y + 12, words, 11, "faint", "middle"))
        x = _LEFT
        for kind in self._used_kinds():
            shapes.append(Box(x, y + 26, 12, 12, _FILLS[kind]))
            shapes.append(Words(x + 18, y + 36, _WORDS[kind], 11, "faint"))
            x += 40 + 6.2 * len(_WORDS[kind])
        return Drawing(_LEFT + _WIDTH + 36, y + 52, shapes, self._title())

    def _total_seconds(self) -> float:
        return self.timeline.seconds or 1.0

    def _used_kinds(self) -> list[str]:
        used = {span.kind for track in self.timeline.tracks.values() for span in track.spans}
        return [kind for kind in _WORDS if kind in used]

    def _title(self) -> str:
        title = f"A step of {seconds_text(self.timeline.seconds)}"
        if self.timeline.schedule and len(self.timeline.tracks) > 1:
            idle = f"stages stand idle {self.timeline.bubble:.0%} of it"
            title += f", {self.timeline.schedule}: {idle}"
        return title


def _merge_spans(spans: Sequence[Span], gap: float) -> list[tuple[str, float, float]]:
    """Return (kind, begin, end) of the spans to draw, with neighbours of one kind joined.

    Spans are joined if at most ``gap`` seconds are between them. Actions of a pipeline schedule
    stay separate, unless they are too short to be distinguished.
    """
    merged: list[tuple[str, float, float]] = []
    last: dict[bool, int] = {}  # overlaps compute or not -> index of the span before
    for span in spans:
        is_wire = span.kind == "wire"
        stays_separate = (
            span.kind in _WORDS and span.kind in "FBIW" and span.end - span.begin > 3 * gap
        )
        k = last.get(is_wire)
        if k is not None and not stays_separate and merged[k][0] == span.kind:
            if span.begin - merged[k][2] <= gap:
                merged[k] = span.kind, merged[k][1], max(merged[k][2], span.end)
                continue
        last[is_wire] = len(merged)
        merged.append((span.kind, span.begin, span.end))
    return merged
