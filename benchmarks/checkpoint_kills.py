"""Kills a training at random moments, 40 times, and sees what is left of its checkpoints.

    python benchmarks/checkpoint_kills.py                40 kills
    python benchmarks/checkpoint_kills.py --kills 10 --seed 3

A training on 1 to 3 ranks saves after each step, in turn while it waits and in the background. It is
killed with SIGKILL, all ranks at once or one before the others, and started again on another number
of ranks. Each time every checkpoint in the folder must be readable to its last byte, the latest must
not be older than the last one that ``save`` had returned, and the losses must be those of a training
that nobody interrupts.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import consistent
from consistent import S, checkpoint

WIDTH = 320  # 1.2 MB of weights, and twice that of optimizer state


def training(ranks: int) -> tuple[Any, Any]:
    """A model split over the ranks, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).double()
    consistent.parallelize(model, consistent.Placement("cpu", range(ranks)), {"*.weight": S(0)})
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def step_of(model: Any, optimizer: Any, step: int) -> float:
    """The loss of one step, whose numbers do not depend on the ranks."""
    made = torch.Generator().manual_seed(step)
    x: Any = torch.randn(8, WIDTH, generator=made, dtype=torch.float64)
    x = consistent.distribute(x, model[0].weight.placement, S(0))
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def rank_of(rank: int, ranks: int, port: int, folder: str, log: str, until: int) -> None:
    """One rank: goes on from the latest checkpoint until it is killed or done."""
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=ranks, timeout=limit)
    model, optimizer = training(ranks)
    start = 0
    if checkpoint.latest(folder):
        start = checkpoint.load(folder, model=model, optimizer=optimizer)["step"]
    with open(log, "a") as file:
        for step in range(start + 1, until + 1):
            loss = step_of(model, optimizer, step)
            wait = step % 2 == 0
            checkpoint.save(folder, model=model, optimizer=optimizer, step=step, wait=wait)
            if rank == 0:
                saved = step if wait else step - 1  # the next save waits for one behind
                file.write(json.dumps({"step": step, "loss": loss, "saved": saved}) + "\n")
                file.flush()
    checkpoint.wait()
    dist.destroy_process_group()


@dataclass
class Found:
    """What a kill left."""

    latest: int  # step of the latest checkpoint, 0 if there is none
    saved: int  # step of the last one that save had returned
    unfinished: bool  # a folder of a save that was under way was left
    losses: dict[int, float]


def start(ranks: int, folder: str, log: str, until: int) -> list[Any]:
    """Start the ranks, from a process that has imported all of it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoint_kills"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[Any] = [
        context.Process(target=rank_of, args=(rank, ranks, port, folder, log, until))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def kill(processes: list[Any], chance: random.Random) -> None:
    """Kill all of them: at once, or one of them and the others some time later."""
    victims = list(processes)
    chance.shuffle(victims)
    later = chance.choice([0.0, 0.0, chance.random() * 0.3])
    for k, process in enumerate(victims):
        if k == 1:
            time.sleep(later)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    for process in victims:
        process.join()


def look(folder: str, log: str) -> Found:
    """Read every checkpoint to its last byte.

    Raises:
        CheckpointError: one is torn.
    """
    lines = [json.loads(line) for line in _whole_lines(log)]
    unfinished = any(path.name.startswith(".saving") for path in Path(folder).glob("*"))
    latest = 0
    for path in sorted(Path(folder).glob("[!.]*")):
        with torch.random.fork_rng():  # the reference goes on with its own numbers
            model, optimizer = training(1)
            step = checkpoint.load(path, model=model, optimizer=optimizer)["step"]
        latest = max(latest, step)
    saved = max((line["saved"] for line in lines), default=0)
    return Found(latest, saved, unfinished, {line["step"]: line["loss"] for line in lines})


def _whole_lines(log: str) -> Iterator[str]:
    if os.path.exists(log):
        with open(log) as file:
            yield from (line for line in file if line.endswith("}\n"))


def kills(count: int, seed: int, folder: str) -> Iterator[Found]:
    """Start and kill ``count`` times; yields what is left each time.

    Raises:
        RuntimeError: something that save had returned is lost, or a loss is another one.
    """
    chance, log = random.Random(seed), os.path.join(folder, "log")
    run = os.path.join(folder, "run")
    model, optimizer = training(1)
    reference: dict[int, float] = {}
    for _ in range(count):
        before = len(list(_whole_lines(log)))
        processes = start(chance.choice([1, 2, 2, 3]), run, log, 1_000_000)
        deadline = time.monotonic() + 60
        while len(list(_whole_lines(log))) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.5)
        kill(processes, chance)
        found = look(run, log)
        for step in range(len(reference) + 1, max(found.losses, default=0) + 1):
            reference[step] = step_of(model, optimizer, step)
        wrong = [s for s, x in found.losses.items() if abs(x - reference[s]) > 1e-9 * reference[s]]
        if wrong or found.latest < found.saved:
            raise RuntimeError(f"step {found.saved} was saved, the latest is {found.latest}; "
                               f"losses differ at steps {wrong}")  # fmt: skip
        yield found


def main() -> None:
    """Print a line for each kill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        under_way = 0
        for k, found in enumerate(kills(args.kills, args.seed, folder)):
            under_way += found.unfinished
            print(
                f"kill {k + 1:2}: latest step {found.latest}, returned {found.saved}"
                + (", a save was under way" if found.unfinished else ""),
                flush=True,
            )
    print(f"{args.kills} kills, {under_way} in the middle of a save: none torn, none lost, losses "
          "as without kills")  # fmt: skip


if __name__ == "__main__":
    main()
