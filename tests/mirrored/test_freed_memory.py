"""Freed memory stays with a rank's process, unless the user has said what is to become of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from mirrored.freed_memory import SWITCH, keep_freed_memory
from mirrored.transports.default import current

BLOCKS, BYTES = 4, 12 << 20  # together more than glibc keeps by itself
PAGES = BLOCKS * BYTES // resource.getpagesize()


def new_pages() -> int:
    """Pages that the same allocations find new each time, at the least: now and then something
    small lies in the middle of what was free."""
    found = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made = [torch.ones(BYTES, dtype=torch.uint8) for _ in range(BLOCKS)]
        made.clear()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


LAUNCHER = "-m torch.distributed.run --standalone --nproc_per_node 2".split()


def started(*words: str, **environment: str) -> list[str]:
    """What this file prints in processes of their own."""
    command = [sys.executable, *words, __file__]
    given = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    return done.stdout.split()


def elsewhere(**environment: str) -> tuple[str, int]:
    """What ``keep_freed_memory`` says in a process of its own, and the new pages there."""
    said, pages = started(**environment)
    return said, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's figures")
def test_what_is_allocated_again_lies_in_pages_that_were_there() -> None:
    said, pages = elsewhere()
    assert said == "True" and pages < PAGES / 100


@pytest.mark.parametrize(
    "name, value",
    [
        (SWITCH, "0"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_says_holds(name: str, value: str) -> None:
    said, pages = elsewhere(**{name: value})
    assert said == "False"
    if "MMAP" in name:  # each block is given back when it is freed
        assert pages > PAGES / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's figures")
def test_ranks_keep_it() -> None:
    assert all(int(pages) < PAGES / 100 for pages in started(*LAUNCHER))


if __name__ == "__main__":
    if "RANK" in os.environ:
        assert current().size == 2  # which is when a rank begins to keep it
        os.write(1, f"{new_pages()}\n".encode())
    else:
        print(keep_freed_memory(), new_pages())
