"""A training whose ranks end themselves at places that a test arms.

    python -m consistent run --nproc-per-node 4 tests/consistent/elastic/program.py FOLDER OPTIONS

Places are armed in FOLDER (``places.py``). There
``progress`` gets a line for each step that is finished, a file ``stop`` ends it after a step, and
``losses.PID`` has the losses of a process that has come to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import consistent
from consistent import checkpoint
from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current
from tests.consistent.elastic import places
from tests.consistent.elastic.places import at
from tests.consistent.elastic.progress import Progress

given: argparse.Namespace


class Rows(Dataset):
    def __len__(self) -> int:
        return given.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at("loader")
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=drawn, dtype=torch.float64), torch.tensor(index % 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 10), nn.Dropout(0.1), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(10)  # buffers change in forward

    def forward(self, x: Tensor) -> Tensor:
        at("forward")
        hidden = self.drop(self.norm(self.up(x)).relu())
        if hidden.requires_grad and not given.compile:
            hidden.register_hook(lambda _: at("backward"))
        return self.down(hidden)


def train(job: consistent.elastic.Job) -> list[float]:
    torch.manual_seed(0)
    plan = (
        {"dp": "data", "fsdp": "zero3"} if given.shards > 1 else "zero3" if given.alone else "data"
    )
    axes = {"dp": -1, "fsdp": given.shards} if given.shards > 1 else ("dp",)
    placement = job.placement(axes, type=given.device)
    model = Model().double()
    consistent.parallelize(model, placement, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    batches = consistent.data.loader(
        Rows(), placement, batch_size=12, shuffle=True, num_workers=given.workers
    )
    saves = given.folder / "checkpoints"
    kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    at("recovery")
    values = job.keep(folder=saves if given.save_every else None, **kept)
    slow = given.slow == current().rank and job.size == 4
    losses: list[float] = list(values.get("losses", []))
    progress = Progress(given.folder)
    progress.goes_on([*enumerate(losses, start=1)])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = consistent.compile(step, backend="ops") if given.compile else step
    while job.step < given.steps:
        for x, y in batches:
            loss = run(x, y).item()
            at("optimizer")
            scheduler.step()
            time.sleep(given.pause)
            time.sleep(0.3 if slow else 0)
            losses = [*losses, loss]
            job.commit(losses=losses)
            at("logged")
            progress.write((job.step, loss))
            if given.save_every and job.step % given.save_every == 0:
                checkpoint.save(saves, step=job.step, losses=losses, **kept)
            if job.step == given.steps or gather_from_ranks((given.folder / "stop").exists())[0]:
                return losses
    return losses


def main() -> None:
    global given
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=2, help="ranks of the axis with zero3")
    parser.add_argument("--alone", action="store_true", help="zero3 on the only axis")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--peers", action="store_true", help="ranks keep each other's parts")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pause", type=float, default=0.03)
    parser.add_argument("--rows", type=int, default=40, help="of the data: 12 are read in a step")
    parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
    parser.add_argument("--slow", type=int, default=-1, metavar="RANK", help="at the start")
    parser.add_argument(
        "--late",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds before a rank comes that was started in another's place",
    )
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    places.begin(given.folder)
    time.sleep(given.late if (given.folder / "progress").exists() else 0)
    losses = consistent.elastic.run(
        train, every=given.every, peers=given.peers, timeout=given.timeout,
        slow=3.0 if given.slow >= 0 else None, slow_steps=3, leave_out=given.slow >= 0,
    )  # fmt: skip
    (given.folder / f"losses.{os.getpid()}").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
