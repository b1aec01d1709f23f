"""Two hosts whose link is cut for a while, or for good: never do both go on by themselves.

The hosts are network namespaces, which only root may make.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.hosts import hosts
from benchmarks.link import NAME
from tests.ranks import ALL

from .control import Run
from .test_elastic import check

pytestmark = pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 runs it: minutes")

STORE = "10.211.77.1:29432"


def launched(folder: Path, names: list[str]) -> list[Run]:
    """Two ranks on each host."""
    found = []
    for host, name in enumerate(names):
        where = ("--nnodes", "2", "--node-rank", str(host), "--endpoint", STORE)
        inside = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={NAME}")
        inside += (f"CONSISTENT_HOST={host}",)
        found.append(Run(folder, 2, "--timeout", "20", launcher=where, inside=inside))
    return found


@pytest.mark.parametrize("seconds", [1, 5, 30, None])
def test_a_link_that_is_cut(tmp_path: Path, seconds: int | None) -> None:
    with hosts(argparse.Namespace(hosts=2, link="")):
        names = os.environ.get("BENCHMARK_HOSTS", "").split()
        if not names:
            pytest.skip("network namespaces need root and iproute2")
        first, second = launched(tmp_path / "run", names)
        try:
            first.wait_until(lambda: bool(first.progress) and first.progress[-1][1] == 4)
            link = ["ip", "-n", names[1], "link", "set", NAME]
            subprocess.run([*link, "down"], check=True)
            cut = time.time()
            if seconds is not None:
                time.sleep(seconds)
                subprocess.run([*link, "up"], check=True)
            done = lambda: [p for p in first.progress if p[2] > cut + (seconds or 0) + 0.5]  # noqa: E731
            first.wait_until(lambda: len(done()) > 2)
            after = done()[0]
            ranks = after[1]
            print(
                f"cut for {seconds} s: goes on with {ranks} ranks, {after[2] - cut:.1f} s after it"
            )
            first.stop()
            check(first, ranks)
            status = second.end(60)
            if ranks == 2:
                assert status == 1, second.text
                said = ("the store at 10.211.77.1:29432 cannot be reached", "was out of reach of")
                assert any(words in second.text for words in said), second.text
            if seconds in (30, None):
                assert ranks == 2
            if seconds == 1:
                assert ranks == 4 and status == 0, second.text
        finally:
            first.kill()
            second.kill()
