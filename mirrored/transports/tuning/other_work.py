"""How much of the host other programs use while ranks measure it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_LITTLE = 0.25  # processors; what a quiet host does by itself stays below


@dataclass(frozen=True)
class Usage:
    """Seconds since some moment: of the clock, of all processors of the host while they worked
    (None where the system does not tell), and of processors while they worked for this process."""

    clock: float
    host: float | None
    process: float

    def __sub__(self, before: Usage) -> Usage:
        host = None
        if self.host is not None and before.host is not None:
            host = self.host - before.host
        return Usage(self.clock - before.clock, host, self.process - before.process)


def usage() -> Usage:
    """The usage up to now. Source: proc_stat(5); steal is what another guest of the machine had."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, _, _, steal = map(int, words[1:9])
        host = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        host = None
    return Usage(time.monotonic(), host, time.process_time())


def others_disturb(host: Usage, processes: list[float]) -> bool:
    """Whether other programs worked beside the ranks so much that times of these mean little.

    Args:
        host: what one rank saw of the host while ranks measured.
        processes: seconds of processors that each rank on that host worked.
    """
    if host.host is None or host.clock <= 0:
        return False
    idle = (os.cpu_count() or 1) - len(processes)  # processors that the ranks leave to others
    return (host.host - sum(processes)) / host.clock > max(_LITTLE, idle)
