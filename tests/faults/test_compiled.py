"""A compiled step in which a rank fails: every rank raises in time, and says on which rank, and at
which line of the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.setting import T
from tests.launch import launch

PROGRAM = Path(__file__).with_name("compiled.py")
TEXT = PROGRAM.read_text().splitlines()


def line(text: str, last: bool = False) -> str:
    """``compiled.py:N`` of the first, or the last, line that has ``text``."""
    found = [k for k, each in enumerate(TEXT, 1) if text in each]
    return f"compiled.py:{found[-1 if last else 0]}"


SENDS = line("to_global(sbp=B)")
# What is said on every rank that waits for rank 2, and what rank 2 raises.
SAID: dict[str, tuple[list[str], str]] = {
    "killed": (["rank 2: process", "killed or crashed", f"for {PROGRAM.parent}/{SENDS}"], ""),
    "raises": (["rank 2", f"for {PROGRAM.parent}/{SENDS}"], "this optimizer is tired"),
    "late": ([f"rank 2: {PROGRAM.parent}/{line('time.sleep(ASTRAY)')}", SENDS], "rank 2: "),
    "one step less": (["waited", "rank 2: ", line("time.sleep(ASTRAY)", last=True)], ""),
}


@pytest.mark.parametrize("name", SAID)
def test_every_rank_raises_and_names_rank_and_line(name: str) -> None:
    done = launch(PROGRAM, name, ranks=4, timeout=90 + 3 * T)
    words, own = SAID[name]
    for rank, text in enumerate(done.printed):
        if rank == 2:
            assert (own in json.loads(text)["words"]) if own else not text
            continue
        assert text, (rank, done.errors[rank])
        found = json.loads(text)["words"]
        for part in [*words, "compiled.py:"]:
            assert part in found, found
