"""report.diff(other): what changed in bytes and layouts, by call site."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import consistent
from consistent.report import Line, Report


def _line(op: str, at: int, layout: str = "B -> B", nbytes: int = 0, count: int = 1) -> Line:
    boxings = Counter({"S(0) -all_gather(0)-> B": count} if nbytes else {})
    return Line(op, f"/a/model.py:{at}", count, False, Counter({layout: count}), boxings, nbytes)


def _report(*lines: Line) -> Report:
    made: Any = Report()
    made._lines = {(line.op, line.site): line for line in lines}
    return made


BEFORE = _report(_line("add", 3), _line("mm", 5, "S(0), S(1) -> S(0)", 96), _line("relu", 9))
AFTER = _report(_line("add", 3, count=4), _line("mm", 8, "S(0), B -> S(0)"), _line("gelu", 9))


def test_changed_new_and_gone_lines_are_told_and_moved_ones_are_paired() -> None:
    assert str(BEFORE.diff(AFTER)) == (
        """\
Bytes sent: 96 B before, 0 B after (-100%). Lines: 1 changed, 1 new, 1 gone, 1 alike that ran more or less often.
  mm at model.py:5 -> model.py:8: -96 bytes
      layouts: S(0), S(1) -> S(0)  =>  S(0), B -> S(0)
      boxings: S(0) -all_gather(0)-> B  =>  none
  relu at model.py:9: the same bytes
      gone: B -> B
  gelu at model.py:9: the same bytes
      new: B -> B"""  # noqa: E501
    )


def test_equal_reports_have_no_difference(tmp_path: Path) -> None:
    same = BEFORE.diff(BEFORE)
    assert not same.changed and str(same).endswith("Lines: 3 alike.")
    assert "Nothing changed" in same.save(tmp_path / "d" / "x.html").read_text()


def test_more_steps_alone_are_no_change() -> None:
    once, twice = _report(_line("mm", 1, nbytes=8)), _report(_line("mm", 1, nbytes=16, count=2))
    assert not once.diff(twice).changed
    assert once.diff(_report(_line("mm", 1, nbytes=9))).changed


def test_the_page_has_a_row_for_each_change() -> None:
    page = BEFORE.diff(AFTER).html()
    assert page.count("<tr>") == 4 and "http" not in page and 'class="tag gone"' in page


def test_only_reports_are_compared() -> None:
    with pytest.raises(TypeError, match="other is of type str.*before.diff"):
        BEFORE.diff("x")  # type: ignore[arg-type]
    assert consistent.Report is Report
