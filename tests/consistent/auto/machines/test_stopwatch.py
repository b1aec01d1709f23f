"""What a call is said to take, of the runs that were timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from consistent.auto.machines import stopwatch


def said(monkeypatch: Any, seconds: Iterator[float] | Sequence[float]) -> float:
    """Of runs that take so long, one after the other; the first call of each try among them."""
    each = iter(seconds)

    def once(run: Any, count: int, alone: bool) -> tuple[float, float]:
        now = next(each) * count
        return now, now

    monkeypatch.setattr(stopwatch, "time_calls", once)
    return stopwatch.typical_seconds(lambda: None)


def test_the_median_counts_and_the_first_call_does_not(monkeypatch: Any) -> None:
    assert said(monkeypatch, [0.25, 0.1, 0.11, 0.12, 0.12, 0.11]) == 0.11


def test_runs_that_differ_much_are_made_anew(monkeypatch: Any) -> None:
    disturbed, steady = [0.1, 0.1, 0.1, 0.3, 0.3, 0.3], [0.1] * 6
    assert said(monkeypatch, [*disturbed, *steady]) == 0.1


def test_a_host_that_is_never_steady_gives_the_least_median(monkeypatch: Any) -> None:
    tries = [[0.1, x / 2, x / 2, x, x, x] for x in (0.2, 0.15, 0.3)]
    assert said(monkeypatch, [x for each in tries for x in each]) == 0.15


def test_a_long_call_is_made_twice(monkeypatch: Any) -> None:
    assert said(monkeypatch, [0.5, 0.4]) == 0.4


def test_a_short_call_is_made_many_times_in_a_run(monkeypatch: Any) -> None:
    counts = []

    def once(run: Any, count: int, alone: bool) -> tuple[float, float]:
        counts.append(count)
        return 1e-5 * count, 1e-5 * count

    monkeypatch.setattr(stopwatch, "time_calls", once)
    assert abs(stopwatch.typical_seconds(lambda: None) - 1e-5) < 1e-12
    assert counts[0] == 1 and set(counts[1:]) == {10}
