"""examples/train_gpt.py under what may happen to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.elastic import SAVE_EVERY, SMALL, Run, difference, lost, rows
from tests.launch import Launched, launch

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


def test_two_axes_have_the_losses_of_one_process(tmp_path: Path) -> None:
    spread, calm = tmp_path / "spread", tmp_path / "calm"
    given = [*SMALL, "--steps", "12"]
    done = launch(EXAMPLE, *given, "--plan", "dp=zero3,tp=tensor", "--out", str(spread), ranks=4)
    assert done.status == 0, done.errors
    assert launch(EXAMPLE, *given, "--out", str(calm), ranks=1).status == 0
    wanted = dict(rows(calm))
    assert [step for step, _ in rows(spread)] == list(wanted) == list(range(1, 13))
    assert difference(rows(spread), wanted) < 1e-5


# The example, whose second rank finds no space for its files from its second save on.
FULL = f"""
import os, resource, runpy, sys
from consistent import checkpoint

save = checkpoint.save

def limited(folder, *, step, **kept):
    if os.environ.get("RANK") == "1" and step > {SAVE_EVERY}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return save(folder, step=step, **kept)

checkpoint.save = limited
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def test_a_full_disk_ends_the_run_with_one_clear_error(tmp_path: Path) -> None:
    """All ranks end, and say which one had no space. The last checkpoint is whole, and the run goes
    on from it once there is space."""
    program, out, calm = tmp_path / "full.py", tmp_path / "full", tmp_path / "calm"
    program.write_text(FULL)

    def run(program: Path, out: Path, ranks: int) -> Launched:
        return launch(program, *SMALL, "--steps", "20", "--plan", "zero3", "--out", str(out),
                      ranks=ranks)  # fmt: skip

    done = run(program, out, 2)
    assert done.status == 1
    for text in done.errors:
        assert "CheckpointError" in text and "on rank 1: OSError" in text, text
    assert os.listdir(out / "checkpoints") == [f"step-{SAVE_EVERY:08d}"]
    again = run(EXAMPLE, out, 2)
    assert again.status == 0, again.errors
    assert f"goes on after step {SAVE_EVERY}, on placement" in again.printed[0]
    run(EXAMPLE, calm, 1)
    assert rows(out)[-1][0] == 20
    assert difference(rows(out), dict(rows(calm))) < 1e-5
