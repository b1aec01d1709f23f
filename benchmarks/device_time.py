"""Time on either kind of device, for the scripts beside this one.

On CUDA the time of a call is that of several calls between two events, divided by their number. The
device is kept busy while they are queued, so that the host's own time is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]
CALLS = 10  # calls between two events
CYCLES = 1 << 21  # keep the device busy for about a millisecond, while the calls are queued
WARM_UP = 2  # rounds before the first that counts


def medians(runs: Mapping[str, Run], device: str, rounds: int) -> dict[str, float]:
    """The median seconds of a call of each, measured in turn after a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run, device))
    return {name: statistics.median(times[WARM_UP:]) for name, times in taken.items()}


def seconds(run: Run, device: str) -> float:
    """Seconds of one call on the CPU; on CUDA the mean of ``CALLS`` calls."""
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
    """Wait until the device has done all its work: without it the time of a launch would be taken
    for that of the work."""
    if device == "cuda":
        torch.cuda.synchronize()
