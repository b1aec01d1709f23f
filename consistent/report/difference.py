"""Compare two reports: which ops, at which call sites, run in other layouts or send other bytes.

Lines are paired by op and ``file:line``. If an edit has moved lines, the unpaired lines of the same
op in the same file are paired in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mirrored.readable import on_one_line

from ..drawing.files import write
from ..drawing.words import short_site
from ..spec.bytes_text import bytes_text
from .difference_page import difference_page
from .lines import Line, most_common


@dataclass(frozen=True, slots=True)
class Change:
    """A line of the first report and its counterpart in the second report; either may be None.

    A line is what one op did at one call site.
    """

    before: Line | None
    after: Line | None

    @property
    def op(self) -> str:
        """The name of the op on these lines."""
        return self._line.op

    @property
    def kind(self) -> str:
        """The kind of the change: "new", "gone", "changed", "count" or "same".

        "changed" means other layouts, boxings or bytes per call; "count" means that only the number
        of calls differs.
        """
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        a, b = self.before, self.after
        same_layouts = a.layouts.keys() == b.layouts.keys() and a.boxings.keys() == b.boxings.keys()
        # Bytes per call are compared by cross-multiplication, so that a count of 0 needs no
        # division.
        if not same_layouts or a.whole != b.whole or a.nbytes * b.count != b.nbytes * a.count:
            return "changed"
        if a.nbytes != b.nbytes and not a.count:  # bytes of backward, which has no count
            return "changed"
        return "same" if (a.count, a.nbytes) == (b.count, b.nbytes) else "count"

    @property
    def nbytes(self) -> int:
        """The bytes that the second report's line sends, minus those of the first report's."""
        return (self.after.nbytes if self.after else 0) - (self.before.nbytes if self.before else 0)

    @property
    def where(self) -> str:
        """The call site, such as ``model.py:40``, with both sites if the line moved."""
        sites = [short_site(line.site) for line in (self.before, self.after) if line is not None]
        return " -> ".join(dict.fromkeys(sites)) or "backward"

    def differences(self) -> list[str]:
        """Return a sentence for each difference between the two lines."""
        if self.before is None or self.after is None:
            line = self._line
            parts = [most_common(line.layouts), most_common(line.boxings)]
            return [f"{self.kind}: {'; boxes '.join(filter(None, parts)) or 'ran'}"]
        a, b = self.before, self.after
        sentences = [
            f"{word}: {most_common(one) or 'none'}  =>  {most_common(other) or 'none'}"
            for word, one, other in (
                ("layouts", a.layouts, b.layouts),
                ("boxings", a.boxings, b.boxings),
            )
            if one.keys() != other.keys()
        ]
        if a.whole != b.whole:
            sentences.append("runs whole on every rank now" if b.whole else "no longer runs whole")
        if a.count != b.count:
            sentences.append(f"count: {a.count} => {b.count}")
        return sentences

    @property
    def _line(self) -> Line:
        line = self.before or self.after
        assert line is not None
        return line


class Difference:
    """The changes from one report to another, as ``Report.diff`` returns them.

    ``print`` shows those in layouts, boxings or bytes; ``save`` writes an HTML page.

    Args:
        changes: a change for each pair of lines, also for equal ones.
        before, after: bytes that all lines of each report send.
    """

    def __init__(self, changes: Sequence[Change], before: int, after: int) -> None:
        self.changes = tuple(changes)
        self.before, self.after = before, after  # bytes

    @property
    def changed(self) -> list[Change]:
        """The changes in layouts, boxings or bytes, the largest change of bytes first."""
        changes = [c for c in self.changes if c.kind in ("new", "gone", "changed")]
        return sorted(changes, key=lambda c: -abs(c.nbytes))

    def summary(self) -> str:
        """Return one sentence on how many more or fewer bytes were sent."""
        kinds = Counter(change.kind for change in self.changes)
        totals = f"{bytes_text(self.before)} before, {bytes_text(self.after)} after"
        if self.before and self.before != self.after:
            totals += f" ({(self.after - self.before) / self.before:+.0%})"
        parts = [f"{kinds[k]} {k}" for k in ("changed", "new", "gone") if kinds[k]]
        rest = [f"{kinds['count']} alike that ran more or less often"] if kinds["count"] else []
        rest += [f"{kinds['same']} alike"] if kinds["same"] else []
        return f"Bytes sent: {totals}. Lines: {', '.join(parts + rest) or 'none'}."

    def __str__(self) -> str:
        out = [self.summary()]
        for change in self.changed:
            sent = f"{change.nbytes:+,} bytes" if change.nbytes else "the same bytes"
            out.append(on_one_line(f"  {change.op} at {change.where}: {sent}"))
            out += [on_one_line(f"      {text}") for text in change.differences()]
        return "\n".join(out)

    __repr__ = __str__

    def html(self) -> str:
        """Return the difference as a self-contained HTML page."""
        rows = [
            (c.kind, c.op, c.where, c.nbytes, "\n".join(map(on_one_line, c.differences())))
            for c in self.changed
        ]
        return difference_page(self.summary(), rows)

    def save(self, path: str | Path) -> Path:
        """Write the HTML page to ``path``; missing folders are created."""
        return write(path, self.html())


def difference(before: Sequence[Line], after: Sequence[Line]) -> Difference:
    """Pair the lines of two reports by op and call site, and return the changes."""
    lines_after = {(line.op, line.site): line for line in after}
    pairs = [(line, lines_after.pop((line.op, line.site), None)) for line in before]
    unpaired: dict[tuple[str, str], list[Line]] = {}
    for line in lines_after.values():
        unpaired.setdefault((line.op, line.site.rpartition(":")[0]), []).append(line)
    changes = []
    for line, counterpart in pairs:
        if counterpart is None and (
            same_op := unpaired.get((line.op, line.site.rpartition(":")[0]))
        ):
            counterpart = same_op.pop(0)
        changes.append(Change(line, counterpart))
    changes += [Change(None, line) for lines in unpaired.values() for line in lines]
    return Difference(changes, sum(x.nbytes for x in before), sum(x.nbytes for x in after))
