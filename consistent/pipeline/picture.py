"""Draw a pipeline schedule: one line for each placement, time from left to right.

The times are simulated (``pipeline/simulate.py``): a backward takes as long as two forwards, and
sending takes no time.
"""

from __future__ import annotations

from ..drawing.pictures.colours import PALETTE, paint, paler
from ..drawing.pictures.drawing import Box, Drawing, Words
from ..drawing.pictures.picture import Picture, wrapped
from .simulate import ScheduleTiming, simulate_schedule
from .table import Action, Schedule

_STYLES = {"F": 0, "B": 2, "I": 4, "W": 5}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of parameters",
}
_LINE_HEIGHT, _UNIT_WIDTH = 34.0, 26.0


class SchedulePicture(Picture):
    """Picture of what each placement does over time, as text or as a drawing.

    An action is shown as its letter and the number of its micro-batch, ``F0``, as wide as it is
    long.
    """

    def __init__(self, table: Schedule) -> None:
        self.table = table
        self.timing: ScheduleTiming = simulate_schedule(table)

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        names = self._line_names()
        margin = max(map(len, names)) + 2
        digits = len(str(self.table.micro_batches - 1)) + 1
        unit = max(digits + 1, 2)  # characters of a forward
        units_per_row = max(1, (width - margin) // unit)
        lines = [*wrapped(self._summary(), width), ""]
        end = int(self.timing.seconds + 0.999)
        for start in range(0, max(end, 1), units_per_row):
            for k, line in enumerate(self.table.lines):
                row = self._row_text(line, start, start + units_per_row, unit, colour)
                lines.append((names[k].ljust(margin) + row).rstrip())
            lines.append("")
        lines += wrapped("; ".join(f"{kind} {_WORDS[kind]}" for kind in self._used_kinds()), width)
        return "\n".join(lines)

    def _row_text(
        self, line: tuple[Action, ...], start: float, stop: float, unit: int, colour: bool
    ) -> str:
        """Return the text of one placement's actions between the times ``start`` and ``stop``.

        A forward takes ``unit`` characters.
        """
        parts, position = [], start
        for action in line:
            action_begin, end = self.timing.times[action]
            begin, end = max(action_begin, start), min(end, stop)
            if end <= begin:
                continue
            parts.append(" " * round((begin - position) * unit))
            size = round((end - begin) * unit)
            # An action that began in the row above goes on without its label.
            mark = f"{action.kind}{action.micro_batch}" if action_begin >= start else ""
            parts.append(paint(mark.ljust(size)[:size], _STYLES[action.kind], colour))
            position = end
        return "".join(parts)

    def drawing(self) -> Drawing:
        names = self._line_names()
        left = 28 + 7.0 * max(map(len, names))
        unit = min(_UNIT_WIDTH, max(8.0, 1100 / max(self.timing.seconds, 1.0)))
        width = left + self.timing.seconds * unit + 24
        shapes: list[Box | Words] = [Words(20, 30, self._summary(), 14, bold=True)]
        y = 48.0
        for k, line in enumerate(self.table.lines):
            shapes.append(Words(20, y + 19, names[k], 12))
            shapes.append(Box(left, y, self.timing.seconds * unit, _LINE_HEIGHT - 6, "empty"))
            for action in line:
                begin, end = self.timing.times[action]
                x, long = left + begin * unit, (end - begin) * unit
                is_first = action.stage == self._stages_on_line(k)[0]
                fill = PALETTE[_STYLES[action.kind]]
                fill = fill if is_first else paler(fill)
                shapes.append(Box(x, y, long, _LINE_HEIGHT - 6, fill, "paper", title=str(action)))
                if unit >= 14:
                    text = str(action.micro_batch)
                    ink = "#ffffff" if action.kind in "FB" and is_first else "#1f2328"
                    shapes.append(Words(x + long / 2, y + 18, text, 11, ink, "middle"))
            y += _LINE_HEIGHT
        x = left
        for kind in self._used_kinds():
            shapes.append(Box(x, y + 6, 12, 12, PALETTE[_STYLES[kind]]))
            shapes.append(Words(x + 18, y + 16, _WORDS[kind], 11, "faint"))
            x += 40 + 6.2 * len(_WORDS[kind])
        note = "Numbers are micro-batches; time runs to the right."
        if len(self.table.lines) < self.table.stages:
            note += " Paler: of a placement's later stages."
        shapes.append(Words(left, y + 38, note, 11, "faint"))
        return Drawing(
            max(width, x, 20 + 8.2 * len(self._summary())), y + 54, shapes, self._summary()
        )

    def _line_names(self) -> list[str]:
        """Return the name of each line, such as "stages 0, 2"."""
        stages = map(self._stages_on_line, range(len(self.table.lines)))
        return [f"stage{'s' if len(s) > 1 else ''} {', '.join(map(str, s))}" for s in stages]

    def _stages_on_line(self, k: int) -> list[int]:
        """Return the stages that run on placement ``k``."""
        return [s for s, line in enumerate(self.table.line_of) if line == k]

    def _used_kinds(self) -> list[str]:
        """Return the kinds of actions that occur in the schedule, for the legend."""
        used = {action.kind for line in self.table.lines for action in line}
        return [kind for kind in _STYLES if kind in used]

    def _summary(self) -> str:
        count = self.table.micro_batches
        return (
            f"{self.table.name}: {self.table.stages} stages, {count} micro-batches; "
            f"placements stand idle {self.timing.bubble:.0%} of the time"
        )
