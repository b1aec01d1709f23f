"""Pipelines and Trainers of other libraries go on after a rank is killed, with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import ALL

from .control import Run, undisturbed

PROGRAM = Path(__file__).with_name("adapters.py")
NAMES = ("pipeline", "transformers", "lightning")
# Of three ranks the middle one holds a stage, and shards, that no other rank has; the first one
# writes the log.
KINDS = [("pipeline", 2, 1), *((kind, 3, rank) for kind in NAMES for rank in (0, 1) if ALL)]


@pytest.mark.parametrize("kind, ranks, rank", KINDS)
def test_a_rank_is_killed(tmp_path: Path, kind: str, ranks: int, rank: int) -> None:
    run = Run(tmp_path / "run", ranks, kind, program=(str(PROGRAM),))
    run.wait_until(lambda: len(run.progress) >= 3)
    run.arm("optimizer", process=run.ranks[rank])
    assert run.end() == 0, run.text
    assert "was ended by SIGKILL." in run.text and f"{ranks - 1} ranks go on" in run.text, run.text
    wanted = undisturbed(tmp_path / "alone", kind, program=PROGRAM)
    found = run.losses()
    assert len(found) == ranks - 1, run.text
    for losses in found:
        assert losses == pytest.approx(wanted, abs=1e-6), run.text
