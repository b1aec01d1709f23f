"""Time on either kind of device, for the scripts beside this one.

On CUDA a time is that of several calls between two events, over their number. The device is kept
busy while they are queued, so that nothing of the host's own time is in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]
CALLS = 10  # between two events
CYCLES = 1 << 21  # about a millisecond, in which they are queued
WARM_UP = 2  # rounds


def medians(runs: Mapping[str, Run], device: str, rounds: int) -> dict[str, float]:
    """Median seconds a call of each, taken in turn, after a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run, device))
    return {name: statistics.median(times[WARM_UP:]) for name, times in taken.items()}


def seconds(run: Run, device: str) -> float:
    """Of one call on CPU, the mean of ``CALLS`` on CUDA."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    start.record()
    for _ in range(CALLS):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / CALLS


def copying(nbytes: int, device: str) -> Run:
    """A copy that moves so many bytes, half of them read and half written."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def wait(device: str) -> None:
    """Until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
