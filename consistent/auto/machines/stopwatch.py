"""Seconds of a call, as far as other programs on the same processor let one see them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

TIMED_S = 0.02  # for which a call is repeated
MOST_RUNS = 50
FEWEST_RUNS = 3
LONG_S = 0.3  # a call that takes longer is made twice


def least_seconds(run: Callable[[], object], count: int = 1) -> float:
    """Seconds of one call: the least of a few runs of `count` calls, the first one left out.

    A run counts with its processor time if that is less and the thread does all the work by
    itself: then other programs had the processor for the rest.
    """
    best, spent, runs = math.inf, 0.0, 0
    alone = torch.get_num_threads() == 1
    first = _once(run, count, alone)[0]
    while runs < (1 if first > LONG_S else FEWEST_RUNS) or (spent < TIMED_S and runs < MOST_RUNS):
        seconds, passed = _once(run, count, alone)
        best, spent, runs = min(best, seconds), spent + passed, runs + 1
    return best / count


def _once(run: Callable[[], object], count: int, alone: bool) -> tuple[float, float]:
    """(seconds that count, seconds that passed)."""
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(count):
        run()
    busy, passed = time.thread_time() - busy, time.perf_counter() - start
    return (min(busy, passed) if alone else passed), passed
