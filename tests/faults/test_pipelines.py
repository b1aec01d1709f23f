"""A pipeline in which a rank fails: every rank raises in time, and says in which stage, on which
rank and at which line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.setting import T
from tests.launch import launch

PROGRAM = Path(__file__).with_name("pipelines.py")
TEXT = PROGRAM.read_text().splitlines()
LINE = {
    "step": f"pipelines.py:{max(k for k, t in enumerate(TEXT, 1) if 'pipe.step(' in t)} in run",
    "late": f"pipelines.py:{1 + TEXT.index('            time.sleep(ASTRAY)')} in __call__",
}
# What is said on every rank that raises; where ranks differ, by rank.
SAID: dict[str, list[str]] = {
    "killed": ["from stage", "rank 2: process", "killed or crashed", LINE["step"]],
    "raises": ["F2 of stage 2", "this block is tired", "rank 2"],
    "late": ["of micro-batch", "from stage", "rank 2: ", LINE["late"]],
    "other shape": ["F2 of stage 2", "stage 2 gives f64[2, 6, 7]", "to stage 3", "rank 2"],
    "micro-batches": ["rank 3: 8 micro-batches of", "rank 0: 4 micro-batches of", LINE["step"]],
    "batch": ["rank 1: 4 micro-batches of int64[6, 6]", "rank 0: 4", LINE["step"]],
    "left out": ['rank 3 of 4 is in no stage: stage 0 is on placement("cpu", ranks=[0])'],
}
GONE = {"killed": [2]}


@pytest.mark.parametrize("name", SAID)
def test_every_rank_raises_and_names_stage_rank_and_line(name: str) -> None:
    done = launch(PROGRAM, name, ranks=4, timeout=90 + 3 * T)
    found: list[dict[str, Any]] = []
    for rank, text in enumerate(done.printed):
        if rank in GONE.get(name, []):
            assert not text
            continue
        assert text, (rank, done.errors[rank])
        found.append(json.loads(text))
    for each in found:
        for part in SAID[name]:
            assert part in each["words"], each["words"]
