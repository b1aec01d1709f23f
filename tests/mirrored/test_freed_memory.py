"""Freed memory stays with a rank's process, unless the user has said what is to become of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mirrored.freed_memory import SWITCH, give_back_freed_memory, keep_freed_memory
from mirrored.transports.default import current
from tests.launch import launch

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


# glibc reads its own variable when an interpreter starts. The others are ours to read, so that a
# fork is as good.
READ_AT_START = "MALLOC_MMAP_THRESHOLD_"


def elsewhere(**environment: str) -> tuple[str, int, int]:
    """In a process of its own: what ``keep_freed_memory`` says, new pages, and pages that it has
    fewer after giving back what is free."""
    if READ_AT_START in environment:
        given = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
        command = [sys.executable, __file__]
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        printed = done.stdout
    else:
        ended = launch(__file__, ranks=1, environment=environment)
        assert ended.status == 0, ended.errors
        (printed,) = ended.printed
    said, pages, fewer = printed.split()
    return said, int(pages), int(fewer)


def given_back() -> int:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    # Reading the figure frees small blocks itself, and that may be what makes glibc give back the
    # end of the heap: read until it stands still.
    before = resident()
    while (now := resident()) != before:
        before = now
    give_back_freed_memory()
    return before - resident()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's figures")
def test_what_is_allocated_again_lies_in_pages_that_were_there() -> None:
    said, pages, fewer = elsewhere()
    assert said == "True" and pages < PAGES / 100 and fewer > PAGES / 2


@pytest.mark.parametrize(
    "name, value",
    [
        (SWITCH, "0"),
        (READ_AT_START, "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_says_holds(name: str, value: str) -> None:
    said, pages, fewer = elsewhere(**{name: value})
    assert said == "False" and fewer == 0
    if name == READ_AT_START:  # each block is given back when it is freed
        assert pages > PAGES / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's figures")
def test_ranks_keep_it() -> None:
    done = launch(__file__, ranks=2)
    assert done.status == 0, done.errors
    assert all(int(pages) < PAGES / 100 for pages in done.printed)


if __name__ == "__main__":
    if "RANK" in os.environ:
        assert current().size == 2  # which is when a rank begins to keep it
        os.write(1, f"{new_pages()}\n".encode())
    else:
        print(keep_freed_memory(), new_pages(), given_back())
