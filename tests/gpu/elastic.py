"""Ranks die and the others go on: the losses are those of one process on the CPU.

It starts a launcher, ends ranks of it at places of a step, and waits until the others go on and a
new one has come (tests/consistent/elastic): with GPUs that reach each other by memory, and as if
they were on several hosts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.consistent.elastic.control import Run, undisturbed

RANKS, CLOSE = 4, 1e-6
PLACES = ("backward", "optimizer", "forward")
STOPPED, TIMEOUT_S = "backward", 6  # a rank that stands still, and how long others wait for it
LIMIT_S = 60.0
# NCCL sends by sockets.
BY_NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def until(run: Run, ranks: int) -> None:
    """Until two more steps were finished, by so many ranks."""
    before = len(run.progress)
    run.wait_until(lambda: len(run.progress) > before + 1 and run.progress[-1][1] == ranks, LIMIT_S)


def killed(folder: Path, device: str, places: tuple[str, ...], *inside: str) -> Run:
    """A run in which a rank is killed at each place, and another one comes in its stead."""
    launcher = ("--max-restarts", str(len(places)))
    run = Run(folder, RANKS, "--device", device, launcher=launcher, inside=inside, forked=False)
    until(run, RANKS)
    for place in places:
        began = time.monotonic()
        run.arm(place)
        run.wait_until(lambda: run.is_taken(place), LIMIT_S)  # noqa: B023
        until(run, RANKS - 1)
        print(f"killed in {place}: two steps later after {time.monotonic() - began:.1f} s")
        until(run, RANKS)
    return run


def stopped(folder: Path, device: str) -> Run:
    """A run in which a rank stands still and is left out."""
    options = ("--shards", "1", "--timeout", str(TIMEOUT_S), "--device", device)
    run = Run(folder, RANKS - 1, *options, launcher=("--patience", "10"), forked=False)
    until(run, RANKS - 1)
    began = time.monotonic()
    run.arm(STOPPED, "SIGSTOP")
    until(run, RANKS - 2)
    print(f"stopped in {STOPPED}: two steps later after {time.monotonic() - began:.1f} s")
    return run


def faults(run: Run, ended: int) -> list[str]:
    """What is wrong at the end of a run, which ``ended`` ranks come to."""
    run.stop()
    status, found = run.end(LIMIT_S), run.losses()
    if status or len(found) != ended:
        return [f"status {status}, {len(found)} of {ended} ranks came to the end\n{run.text}"]
    wanted = undisturbed(run.folder / "alone", "--pause", "0", "--steps", str(len(found[0])))
    gap = max(abs(a - b) for each in found for a, b in zip(each, wanted, strict=True))
    print(f"{len(wanted)} steps on {ended} ranks, losses at most {gap:.1e} apart", flush=True)
    steps = [step for step, *_ in run.progress]
    wrong = [] if gap <= CLOSE else [f"losses are {gap:.1e} apart"]
    return wrong + ([] if steps == [*range(1, len(wanted) + 1)] else [f"steps {steps}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as name:
        wrong = faults(stopped(Path(name, "stopped"), device), RANKS - 2)
        wrong += faults(killed(Path(name, "killed"), device, PLACES), RANKS)
        if device == "cuda":
            network = ("env", *(f"{key}={value}" for key, value in BY_NETWORK.items()))
            wrong += faults(killed(Path(name, "network"), device, PLACES[:1], *network), RANKS)
    print(*wrong, f"ranks that die and stand still, {device}: {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
