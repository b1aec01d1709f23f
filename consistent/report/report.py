"""report(): what ran — ops, layouts, boxings with their bytes, ops that ran whole on every rank."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..autograd import backward
from ..boxing.plan import plan_bytes
from ..boxing.steps import Step
from ..dispatch.plans import plan as plans
from ..movement import check_mode
from ..movement import run as boxing_run
from ..spec import TensorSpec


@dataclass(slots=True)
class Line:
    """One op at one call site."""

    op: str
    site: str
    count: int = 0
    whole: bool = False
    layouts: Counter[str] = field(default_factory=Counter)
    boxings: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0


class Report:
    """Lines by (op name, call site), in the order first met. Bytes are those that the busiest
    rank sends."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line] = {}

    @property
    def lines(self) -> list[Line]:
        """All lines."""
        return list(self._lines.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all boxings."""
        return sum(line.nbytes for line in self.lines)

    @property
    def whole(self) -> list[str]:
        """Names of the ops that had no fitting rule and ran whole on every rank."""
        return sorted({line.op for line in self.lines if line.whole})

    def count(self, op: str) -> int:
        """How often ``op`` ran."""
        return sum(line.count for line in self.lines if line.op == op)

    def boxings(self) -> Counter[str]:
        """How often each boxing ran, by its printed moves."""
        return sum((line.boxings for line in self.lines), Counter())

    def _line(self, op: str, site: str) -> Line:
        return self._lines.setdefault((op, site), Line(op, site))

    def _op(self, plan: plans.Plan, ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]) -> None:
        line = self._line(plan.name, check_mode.call_site())
        line.count += 1
        # An op whose inputs are all B anyway loses nothing by running whole.
        moved = any(any(not e.is_broadcast for e in spec.sbp) for spec in ins)
        line.whole = line.whole or (plan.is_whole and moved)
        line.layouts[f"{_sbps(ins)} -> {_sbps(outs)}"] += 1

    def _boxing(self, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        if not moves:
            return
        in_backward = backward.in_backward()
        line = self._line(
            "backward" if in_backward else check_mode.current(),
            "" if in_backward else check_mode.call_site(),
        )
        line.boxings[f"{', '.join(map(str, moves))}"] += 1
        line.nbytes += plan_bytes(moves)

    # -- showing it --------------------------------------------------------------------------------

    def _cells(self) -> list[tuple[str, ...]]:
        rows = []
        for line in sorted(self.lines, key=lambda line: -line.nbytes):
            layouts = "; ".join(_times(*item) for item in line.layouts.most_common(3))
            boxings = "; ".join(_times(*item) for item in line.boxings.most_common(3))
            rows.append(
                (
                    line.op,
                    str(line.count or ""),
                    layouts,
                    boxings,
                    f"{line.nbytes:,}" if line.nbytes else "",
                    "yes" if line.whole else "",
                    line.site,
                )
            )
        return rows

    _HEAD = ("op", "count", "layout", "boxings", "bytes", "whole", "where")

    def __str__(self) -> str:
        rows = [self._HEAD, *self._cells()]
        limits = (32, 6, 44, 60, 14, 5)
        rows = [(*(_fit(c, n) for c, n in zip(row, limits)), _fit_end(row[-1], 40)) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self._HEAD))]
        text = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        text.insert(1, "  ".join("-" * w for w in widths))
        whole = ", ".join(self.whole) or "none"
        text.append(f"{self.nbytes:,} bytes boxed; ran whole on every rank: {whole}")
        return "\n".join(text)

    def html(self) -> str:
        """The table as a page of its own."""
        head = "".join(f"<th>{name}</th>" for name in self._HEAD)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._cells()
        )
        whole = html.escape(", ".join(self.whole) or "none")
        return (
            "<!doctype html><meta charset=utf-8><title>consistent: what ran</title>"
            "<style>body{font:14px sans-serif}table{border-collapse:collapse}"
            "td,th{border:1px solid #ccc;padding:2px "
            "8px;text-align:left;vertical-align:top}</style>"
            f"<h1>What ran</h1><p>{self.nbytes:,} bytes boxed (busiest rank). Ran whole on every "
            f"rank: {whole}.</p>"
            f"<table><tr>{head}</tr>\n{body}</table>"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to ``path``."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html(), encoding="utf-8")
        return target


@contextmanager
def report() -> Iterator[Report]:
    """``with report() as r:`` collects what runs inside; ``print(r)``, ``r.save("report.html")``.

    Only this rank's view, which is the same on every rank: nothing is communicated.
    """
    made = Report()
    plans.observers.append(made._op)
    boxing_run.observers.append(made._boxing)
    try:
        yield made
    finally:
        plans.observers.remove(made._op)
        boxing_run.observers.remove(made._boxing)


def _sbps(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(s.sbp[0] if len(s.sbp) == 1 else s.sbp) for s in specs)


def _times(text: str, count: int) -> str:
    return f"{count}x {text}" if count > 1 else text


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _fit_end(text: str, width: int) -> str:
    """The last ``width`` characters: a path's end says more than its start."""
    return text if len(text) <= width else "..." + text[3 - width :]
