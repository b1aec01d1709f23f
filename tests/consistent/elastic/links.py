"""Two hosts that train together, whose link is cut for a while, or for good.

The hosts are network namespaces, which only root may make.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.hosts import hosts
from benchmarks.link import NAME

from .control import Run

STORE = "10.211.77.1:29432"


class Cut(NamedTuple):
    """What the two sides did, in seconds after the cut.

    Attributes:
        first, second: their launches; the first one has the store.
        goes_on_s: when the first side finished a step that it began after the cut.
        ranks: how many ranks did that step.
        ends_s: when the second side said that it ends; None if it goes on.
        status: the exit status of the second side.
    """

    first: Run
    second: Run
    goes_on_s: float
    ranks: int
    ends_s: float | None
    status: int

    def __str__(self) -> str:
        second = "goes on with it" if self.ends_s is None else f"ends after {self.ends_s:.1f} s"
        return (
            f"the side with the store goes on with {self.ranks} ranks, {self.goes_on_s:.1f} s "
            f"after the cut; the other side {second}"
        )


@contextmanager
def cut(folder: Path, seconds: float | None) -> Iterator[Cut | None]:
    """Train with two ranks on each host, and cut the link for so many seconds; None: for good.

    Gives None where namespaces may not be made.
    """
    with hosts(argparse.Namespace(hosts=2, link="")):
        names = os.environ.get("BENCHMARK_HOSTS", "").split()
        if not names:
            yield None
            return
        first, second = _launched(folder, names)
        try:
            yield _cut(first, second, ["ip", "-n", names[1], "link", "set", NAME], seconds)
        finally:
            first.kill()
            second.kill()


def _launched(folder: Path, names: list[str]) -> list[Run]:
    found = []
    for host, name in enumerate(names):
        where = ("--nnodes", "2", "--node-rank", str(host), "--endpoint", STORE)
        inside = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={NAME}")
        inside += (f"CONSISTENT_HOST={host}",)
        found.append(Run(folder, 2, "--timeout", "20", launcher=where, inside=inside))
    return found


def _cut(first: Run, second: Run, link: list[str], seconds: float | None) -> Cut:
    first.wait_until(lambda: bool(first.progress) and first.progress[-1][1] == 4)
    subprocess.run([*link, "down"], check=True)
    at = time.time()
    if seconds is not None:
        time.sleep(seconds)
        subprocess.run([*link, "up"], check=True)
    back = at + (seconds or 0) + 0.5
    first.wait_until(lambda: sum(p[2] > back for p in first.progress) > 2)
    # Ranks may finish a step whose messages were on their way, so the pause is what counts.
    times = [t for _, _, t, _ in first.progress]
    _, k = max((b - a, k) for k, (a, b) in enumerate(zip(times, times[1:])) if b > at)
    _, ranks, goes_on, _ = first.progress[k + 1]
    first.stop()
    assert first.end() == 0, first.text
    status = second.end(60)
    said = re.search(
        r"^(\S+) .*elastic: .*(cannot be reached|was out of reach)", second.text, re.MULTILINE
    )
    ends = None if said is None else float(said[1]) - at
    return Cut(first, second, goes_on - at, ranks, ends, status)
