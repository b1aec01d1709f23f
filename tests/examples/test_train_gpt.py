"""examples/train_gpt.py under what may happen to a run."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path

from benchmarks.elastic import SAVE_EVERY, SMALL, Run, difference, lost, rows
from tests.launch import Launched, launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS, FEW = 60, 12


def alone(out: Path, steps: int) -> str:
    """What one process without a launcher prints."""
    done = launch(EXAMPLE, *SMALL, "--steps", str(steps), "--out", str(out), ranks=1)
    assert done.status == 0, done.errors
    return done.printed[0]


@functools.cache
def undisturbed(steps: int) -> dict[int, float]:
    """The loss of each step of a run of one process."""
    with tempfile.TemporaryDirectory() as folder:
        alone(Path(folder), steps)
        found = dict(rows(Path(folder)))
    assert list(found) == list(range(1, steps + 1))
    return found


def test_goes_on_after_a_kill_after_sigterm_and_on_fewer_ranks(tmp_path: Path) -> None:
    """A rank is killed, and torchrun starts both again; SIGTERM saves and ends the run; one process
    ends it. The losses are those of a run that nothing disturbs."""
    killed = tmp_path / "killed"
    killed.mkdir()
    forks = ("-m", "tests.forked_ranks", "torch.distributed.run")
    run = Run(killed, 2, STEPS, restarts=3, torchrun=forks)
    assert run.wait_until(lambda: len(rows(killed)) > SAVE_EVERY + 1)
    run.kill(run.ranks[1:])
    before = len(rows(killed))
    assert run.wait_until(lambda: len(rows(killed)) > before + 1)
    run.kill([run.process.pid], signal.SIGTERM)
    assert run.process.wait(60) != 0  # the launcher's own way to end then
    reached = rows(killed)[-1][0]
    text = alone(killed, STEPS)
    assert f"goes on after step {reached}, on placement" in text

    assert [step for step, _ in rows(killed)] == list(range(1, STEPS + 1))
    assert "run again" not in text and len(lost(killed)) <= 1  # by the kill; SIGTERM loses no step
    assert max([0, *lost(killed)]) <= 2 * SAVE_EVERY  # a save ends while training goes on
    assert difference(rows(killed), undisturbed(STEPS)) < 1e-5
    assert (killed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not [each for each in os.listdir(killed / "checkpoints") if each.startswith(".")]


def test_two_axes_have_the_losses_of_one_process(tmp_path: Path) -> None:
    given = [*SMALL, "--steps", str(FEW), "--plan", "dp=zero3,tp=tensor", "--out", str(tmp_path)]
    done = launch(EXAMPLE, *given, ranks=4)
    assert done.status == 0, done.errors
    assert [step for step, _ in rows(tmp_path)] == list(range(1, FEW + 1))
    assert difference(rows(tmp_path), undisturbed(FEW)) < 1e-5


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
    program, out = tmp_path / "full.py", tmp_path / "full"
    program.write_text(FULL)

    def run(program: Path, out: Path, ranks: int) -> Launched:
        return launch(program, *SMALL, "--steps", str(FEW), "--plan", "zero3", "--out", str(out),
                      ranks=ranks)  # fmt: skip

    done = run(program, out, 2)
    assert done.status == 1
    for text in done.errors:
        assert "CheckpointError" in text and "on rank 1: OSError" in text, text
    assert os.listdir(out / "checkpoints") == [f"step-{SAVE_EVERY:08d}"]
    again = run(EXAMPLE, out, 2)
    assert again.status == 0, again.errors
    assert f"goes on after step {SAVE_EVERY}, on placement" in again.printed[0]
    assert rows(out)[-1][0] == FEW
    assert difference(rows(out), undisturbed(FEW)) < 1e-5
