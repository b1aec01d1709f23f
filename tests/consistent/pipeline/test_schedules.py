"""Tables of schedules: what they are, and how long placements stand idle."""

from __future__ import annotations

import pytest

from consistent.pipeline.schedules import SCHEDULES, lines_of, schedule, stages_per_line
from consistent.pipeline.simulate import check_schedule, simulate_schedule
from consistent.pipeline.table import Action, Schedule


def text(table: Schedule) -> list[str]:
    return [" ".join(f"{a.kind}{a.micro_batch}" for a in line) for line in table.lines]


def test_1f1b_is_the_table_of_its_docstring() -> None:
    assert text(schedule("1f1b", 4, 4, 5)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    assert text(schedule("GPipe", 2, 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


@pytest.mark.parametrize("lines", [2, 3, 4])
@pytest.mark.parametrize("count", [8, 12])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_is_the_formulas(name: str, count: int, lines: int) -> None:
    each = stages_per_line(name)
    found = simulate_schedule(schedule(name, lines, lines * each, count)).bubble
    wanted = {
        "one at a time": (lines - 1) / lines,
        "gpipe": (lines - 1) / (count + lines - 1),
        "1f1b": (lines - 1) / (count + lines - 1),
        "interleaved1f1b": (lines - 1) / (each * count + lines - 1),
        "loopedbfs": (lines - 1) / (each * count + lines - 1),
    }
    if name in wanted:
        assert found == pytest.approx(wanted[name])
    else:
        assert found < (lines - 1) / (each * count + lines - 1)


def test_v_schedules_come_back() -> None:
    assert lines_of("zbvzerobubble", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert lines_of("loopedbfs", 3, 6) == (0, 1, 2, 0, 1, 2)


def test_one_micro_batch_keeps_at_most_as_many_as_there_are_stages() -> None:
    for line, actions in enumerate(schedule("1f1b", 4, 4, 9).lines):
        alive = peak = 0
        for action in actions:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert peak == 4 - line


def test_what_does_not_fit_says_what_does() -> None:
    with pytest.raises(ValueError, match=r"'1f1b' runs 1 on each of 2 placements.*\n.*'loopedbfs'"):
        schedule("1f1b", 2, 4, 8)
    with pytest.raises(ValueError, match="'dualpipev' cannot run 2 micro-batches through 4 stages"):
        schedule("dualpipev", 2, 4, 2)


def test_tables_that_would_hang_or_skip_are_found() -> None:
    forward, back = Action("F", 0, 0), Action("B", 0, 0)
    second = Action("F", 1, 0), Action("B", 1, 0)
    check_schedule(Schedule("good", ((forward, back), second), (0, 1), 1))
    with pytest.raises(ValueError, match="does not run stage 0 once"):
        check_schedule(Schedule("skips", ((forward,), second), (0, 1), 1))
    with pytest.raises(ValueError, match="stops before B0 of stage 0, which waits for what never"):
        check_schedule(Schedule("hangs", ((back, forward), second), (0, 1), 1))
