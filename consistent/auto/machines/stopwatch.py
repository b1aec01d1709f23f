"""Seconds of a call, as far as other programs on the same processor let one see them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

TIMED_S = 0.02  # for which a call is repeated
RUN_S = 1e-4  # of one run at least: a shorter call is made several times in each
MOST_RUNS = 50
FEWEST_RUNS = 5
LONG_S = 0.3  # a call that takes longer is made twice
TRIES = 3
STEADY = 1.25  # how many times as long as a quarter of the runs three quarters of them may take


def typical_seconds(run: Callable[[], object]) -> float:
    """Seconds of one call: the median of a few runs, the first call left out.

    Not the least of them: a step is made of many calls, so it takes what they take mostly. A run
    counts with its processor time if that is less and the thread does all the work by itself: then
    other programs had the processor for the rest. Where runs differ much, something disturbed
    them, so they are made again, and the least median counts.
    """
    medians = []
    for _ in range(TRIES):
        found = _runs(run)
        medians.append(found[len(found) // 2])
        if found[3 * len(found) // 4] <= STEADY * found[len(found) // 4]:
            break
    return min(medians)


def _runs(run: Callable[[], object]) -> list[float]:
    """Seconds of a call in each run, in rising order."""
    found: list[float] = []
    spent, alone = 0.0, torch.get_num_threads() == 1
    first = _once(run, 1, alone)[0]
    count = max(1, round(RUN_S / max(first, 1e-6)))
    fewest = 1 if first > LONG_S else FEWEST_RUNS
    while len(found) < fewest or (spent < TIMED_S and len(found) < MOST_RUNS):
        seconds, passed = _once(run, count, alone)
        found.append(seconds / count)
        spent += passed
    return sorted(found)


def _once(run: Callable[[], object], count: int, alone: bool) -> tuple[float, float]:
    """(seconds that count, seconds that passed)."""
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(count):
        run()
    busy, passed = time.thread_time() - busy, time.perf_counter() - start
    return (min(busy, passed) if alone else passed), passed
