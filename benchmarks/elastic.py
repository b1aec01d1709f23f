"""Kills a training run at random moments, again and again, and says what was lost.

    python benchmarks/elastic.py --kills 30

The run is ``examples/train_gpt.py`` under ``torchrun --max-restarts``. In turn one rank is killed,
all ranks, the launcher and all ranks at once (then it is launched again, on another number of
ranks), each in mid-step or in mid-save, or the launcher gets SIGTERM, on which ranks save and
leave. Each step's loss is compared with that of a run which nothing disturbs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 5
SMALL = (
    "--batch 6 --context 32 --layers 2 --width 32 --heads 2 --bytes 60000 --check-every 1000000"
).split() + ["--save-every", str(SAVE_EVERY)]
KINDS = ("one rank", "all ranks", "launcher and ranks", "SIGTERM to the launcher")


class Run:
    """One launch of the example by torchrun, or by another command that takes its arguments."""

    def __init__(
        self, out: Path, ranks: int, steps: int, restarts: int = 1000, plan: str = "zero3",
        torchrun: tuple[str, ...] = ("-m", "torch.distributed.run"),
    ):  # fmt: skip
        self.out = out
        launcher = [*torchrun, "--standalone", "--nproc_per_node", str(ranks)]
        launcher += ["--max-restarts", str(restarts)]
        program = [str(ROOT / "examples" / "train_gpt.py"), *SMALL, "--plan", plan]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *program, "--steps", str(steps), "--out", str(out)],
            env=environment, stdout=open(out / "printed.txt", "a"),
            stderr=open(out / "errors.txt", "a"),
        )  # fmt: skip

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks that run."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()] if path.exists() else []

    def wait_until(self, ready, limit: float = 120.0) -> bool:
        """Whether ``ready()`` came true before the run ended."""
        end = time.monotonic() + limit
        while not ready():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end:
                self.kill(self.ranks + [self.process.pid])
                raise TimeoutError(f"no progress in {limit} s; see {self.out / 'errors.txt'}")
            time.sleep(0.005)
        return True

    def kill(self, pids: list[int], by: int = signal.SIGKILL) -> None:
        """Send a signal to processes that may have ended."""
        for pid in pids:
            try:
                os.kill(pid, by)
            except ProcessLookupError:
                pass


def rows(out: Path) -> list[tuple[int, float]]:
    """(step, loss) of all steps; those that are to run again are taken out when they begin to."""
    path = out / "steps.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss)) for step, loss, _ in map(str.split, lines)]


def saving(out: Path) -> bool:
    """Whether a checkpoint is being written."""
    folder = out / "checkpoints"
    return folder.exists() and any(name.startswith(".saving") for name in os.listdir(folder))


def strike(run: Run, kind: str, in_save: bool, choose: random.Random) -> bool:
    """Let the run make some steps, then kill. False if it ended before."""
    start = len(rows(run.out)) + choose.randrange(1, 3 * SAVE_EVERY)
    if not run.wait_until(lambda: len(rows(run.out)) >= start):
        return False
    if in_save and not run.wait_until(lambda: saving(run.out)):
        return False
    time.sleep(choose.random() * 0.05)
    if kind == "one rank":
        run.kill([choose.choice(run.ranks)] if run.ranks else [])
    elif kind == "all ranks":
        run.kill(run.ranks)
    elif kind == "launcher and ranks":
        run.kill([run.process.pid, *run.ranks])
        run.process.wait()
    else:
        run.kill([run.process.pid], signal.SIGTERM)
        run.process.wait()
    return True


def lost(out: Path) -> list[int]:
    """How many steps were run again, of the restarts at which there were any."""
    printed = (out / "printed.txt").read_text()
    return [int(count) for count in re.findall(r"; (\d+) steps run again", printed)]


def difference(found: list[tuple[int, float]], wanted: dict[int, float]) -> float:
    """The largest between a loss of the run and that of the undisturbed one."""
    return max(abs(loss - wanted[step]) for step, loss in found)


def main() -> None:
    """Kill, restart, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ranks", type=int, default=3)
    args = parser.parse_args()
    choose, struck = random.Random(args.seed), Counter()
    steps = 40 * args.kills
    with tempfile.TemporaryDirectory() as folder:
        calm, out = Path(folder, "calm"), Path(folder, "killed")
        calm.mkdir()
        out.mkdir()
        run = None
        for number in range(args.kills):
            if run is None or run.process.poll() is not None:
                run = Run(out, choose.randint(1, args.most_ranks), steps)
            kind, in_save = KINDS[number % 4], choose.random() < 0.5
            if strike(run, kind, in_save, choose):
                struck[kind + (" in mid-save" if in_save else "")] += 1
            print(f"{number + 1}: {kind}, after step {rows(out)[-1][0]}", flush=True)
        if run is not None:
            before = len(rows(out))
            run.wait_until(lambda: len(rows(out)) > before + SAVE_EVERY)
            run.kill([run.process.pid, *run.ranks])
            run.process.wait()
        found = rows(out)
        last = max(step for step, _ in found)
        reference = Run(calm, 1, steps, plan="data")
        reference.wait_until(lambda: len(rows(calm)) >= last, limit=600)
        reference.kill([*reference.ranks, reference.process.pid])
        reference.process.wait()
        again = lost(out)
        print(f"\n{dict(struck)}")
        print(f"{last} steps; run again after a kill: {sorted(again)} (a save every {SAVE_EVERY})")
        print(f"largest difference of a loss: {difference(found, dict(rows(calm))):.1e}")


if __name__ == "__main__":
    main()
