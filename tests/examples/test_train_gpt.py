"""examples/train_gpt.py under what may happen to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.elastic import SAVE_EVERY, SMALL, Run, difference, lost, rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 60


def alone(out: Path) -> str:
    """What one process without a launcher prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL, "--steps", str(STEPS), "--out", str(out)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def test_goes_on_after_a_kill_after_sigterm_and_on_fewer_ranks(tmp_path: Path) -> None:
    """A rank is killed, and torchrun starts both again; SIGTERM saves and ends the run; one process
    ends it. The losses are those of a run that nothing disturbs."""
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    killed.mkdir()
    run = Run(killed, 2, STEPS, restarts=3)
    assert run.wait_until(lambda: len(rows(killed)) > SAVE_EVERY + 1)
    run.kill(run.ranks[1:])
    before = len(rows(killed))
    assert run.wait_until(lambda: len(rows(killed)) > before + 1)
    run.kill([run.process.pid], signal.SIGTERM)
    assert run.process.wait(60) != 0  # the launcher's own way to end then
    reached = rows(killed)[-1][0]
    text = alone(killed)
    assert f"goes on after step {reached}, on placement" in text
    alone(calm)

    wanted = dict(rows(calm))
    assert [step for step in sorted(wanted)] == list(range(1, STEPS + 1))
    assert rows(killed)[-1][0] == STEPS
    assert len(lost(rows(killed))) <= 1  # by the kill; SIGTERM loses no step
    assert max([0, *lost(rows(killed))]) <= 2 * SAVE_EVERY  # a save ends while training goes on
    assert difference(rows(killed), wanted) < 1e-5
    assert (killed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not [each for each in os.listdir(killed / "checkpoints") if each.startswith(".")]
