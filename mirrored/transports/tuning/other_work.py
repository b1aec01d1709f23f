"""Detects whether other programs used the host while ranks measured it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_NEGLIGIBLE_LOAD = 0.25  # processors; the background work of a quiet host stays below


@dataclass(frozen=True)
class Usage:
    """Clock and processor seconds since a fixed start; subtract two to get those of an interval.

    Attributes:
        clock: elapsed time.
        host: time in which processors of the host worked, summed over all of them; None if the
            system does not report it.
        process: processor time of this process.
    """

    clock: float
    host: float | None
    process: float

    def __sub__(self, before: Usage) -> Usage:
        host = None
        if self.host is not None and before.host is not None:
            host = self.host - before.host
        return Usage(self.clock - before.clock, host, self.process - before.process)


def usage() -> Usage:
    """Return the clock, and the processor seconds used so far; subtract two to measure an interval.

    The host's time is read from /proc/stat (proc_stat(5)). It includes "steal", the time that the
    hypervisor gave to other virtual machines.
    """
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, _, _, steal = map(int, words[1:9])
        host = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        host = None
    return Usage(time.monotonic(), host, time.process_time())


def others_disturb(host: Usage, processes: list[float]) -> bool:
    """Return whether other programs used so much of a host that timings mean little.

    They did if they used more processors than the ranks leave to them. Returns False if the system
    does not report the host's usage.

    Args:
        host: the usage of the host while ranks measured, as one rank saw it.
        processes: processor seconds of each rank on that host.
    """
    if host.host is None or host.clock <= 0:
        return False
    idle = (os.cpu_count() or 1) - len(processes)  # processors that the ranks leave to others
    return (host.host - sum(processes)) / host.clock > max(_NEGLIGIBLE_LOAD, idle)
