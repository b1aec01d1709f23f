"""Timing of a call, with little disturbance by other programs on the same processor."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

TIMED_S = 0.02  # seconds for which a call is repeated
RUN_S = 1e-4  # least seconds of one run: a run makes a shorter call several times
MAX_RUNS = 50
FEWEST_RUNS = 5
LONG_S = 0.3  # a call that takes longer is made only twice, and its second run counts
TRIES = 3
MAX_QUARTILE_RATIO = 1.25  # largest ratio of the third quartile of the runs to the first


def typical_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call: the median of a few runs, without the first call.

    This is not the minimum, because a step consists of many calls and takes their usual time. With
    one torch thread, the processor time of a run counts if it is less than the time that passed,
    since other programs had the processor for the rest. If runs differ much, something disturbed
    them, so they are repeated, and the least median counts.
    """
    medians = []
    for _ in range(TRIES):
        runs = _seconds_of_runs(run)
        medians.append(runs[len(runs) // 2])
        if runs[3 * len(runs) // 4] <= MAX_QUARTILE_RATIO * runs[len(runs) // 4]:
            break
    return min(medians)


def _seconds_of_runs(run: Callable[[], object]) -> list[float]:
    """Return the seconds per call in each of several runs, in ascending order.

    A run makes a short call many times. The first call is not counted.
    """
    runs: list[float] = []
    spent_seconds, single_threaded = 0.0, torch.get_num_threads() == 1
    first = time_calls(run, 1, single_threaded)[0]
    count = max(1, round(RUN_S / max(first, 1e-6)))
    fewest = 1 if first > LONG_S else FEWEST_RUNS
    while len(runs) < fewest or (spent_seconds < TIMED_S and len(runs) < MAX_RUNS):
        seconds, passed = time_calls(run, count, single_threaded)
        runs.append(seconds / count)
        spent_seconds += passed
    return sorted(runs)


def time_calls(run: Callable[[], object], count: int, single_threaded: bool) -> tuple[float, float]:
    """Make ``count`` calls, and return (seconds to report, wall-clock seconds) of all together.

    With ``single_threaded``, for a single torch thread, processor time is reported if it is less
    than wall-clock time.
    """
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(count):
        run()
    busy, passed = time.thread_time() - busy, time.perf_counter() - start
    # With several threads the others' processor time is missing from ``busy``.
    return (min(busy, passed) if single_threaded else passed), passed
