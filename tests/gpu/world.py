"""How the programs of this folder begin and end: a process a rank, under torchrun, or one alone.

    torchrun --standalone --nproc_per_node 2 -m tests.gpu.boxing_pairs --device cuda

Ranks may share a GPU (docs/gpu.md). Faults are collected and not raised, so that no rank waits for
one that has left; the exit status of all says whether any rank found one.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import process_group
from mirrored.transports.default import current
from mirrored.transports.tuning import table
from tests.gpu.checks import SECONDS

SHOWN = 20  # faults a rank


@dataclass
class World:
    """This process among the ranks, and what it has found."""

    device: str
    rank: int
    size: int
    part: slice = field(default_factory=lambda: slice(None))  # of what there is to try
    tried: int = 0
    faults: list[str] = field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        """Count a comparison, and keep ``what`` if it fails."""
        self.tried += 1
        if not good:
            self.faults.append(what)

    def close(self, made: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
        """Expect equal shapes, dtypes left aside, and values no further apart than ``tolerance``
        times (1 + the largest that is wanted)."""
        made, wanted = made.detach().double().cpu(), wanted.detach().double().cpu()
        if made.shape != wanted.shape:
            return self.expect(False, f"{what}: shape {made.shape}, not {wanted.shape}")
        if not made.numel():
            return self.expect(True, what)
        gap = (made - wanted).abs().max().item()
        room = tolerance * (1 + wanted.abs().max().item())
        return self.expect(gap <= room, f"{what}: {gap:.2e} apart, and {room:.2e} is allowed")

    def gathered(self, mine: Any) -> list[Any]:
        """What each rank has, by torch's own way through the CPU; empty but on rank 0."""
        everyone: list[Any] = [None] * self.size
        dist.gather_object(mine, everyone if self.rank == 0 else None)
        return everyone if self.rank == 0 else []

    def say(self, text: str) -> None:
        """Print once."""
        if self.rank == 0:
            print(text, flush=True)

    def end(self) -> None:
        """Print what all ranks found and leave with the status that says so."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.tried, self.faults))
        for rank, (_, faults) in enumerate(found):
            for fault in faults[:SHOWN]:
                self.say(f"rank {rank}: {fault}")
        wrong = sum(len(faults) for _, faults in found)
        tried = sum(count for count, _ in found)
        self.say(f"{tried} comparisons on {self.size} rank(s), {self.device}: {wrong} wrong")
        dist.destroy_process_group()
        sys.exit(wrong > 0 or tried == 0)


def start(description: str | None) -> World:
    """Reads ``--device`` and meets the other ranks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--every", type=int, default=1, help="try each N-th member of a long list")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    asked = parser.parse_args()
    device, part = asked.device, slice(asked.first, None, asked.every)
    if sys.platform == "linux":  # ranks end with their launcher, however that ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    if seconds := os.environ.get(SECONDS):  # one that hangs says where before it is ended
        faulthandler.dump_traceback_later(max(1.0, 0.9 * float(seconds)))
    process_group.start(device)
    world = World(device, dist.get_rank(), dist.get_world_size(), part)
    where = torch.cuda.get_device_name() if device == "cuda" else table.cpu_device_name()
    _use_built_in_tables(world.size, where)
    world.say(f"torch {torch.__version__}, {where}, {world.size} rank(s), {_transports()}")
    wanted = world.size > 1 and os.environ.get("CONSISTENT_SHARED_MEMORY", "1") != "0"
    shared = current().shares(tuple(range(world.size)), device)
    world.expect(shared == wanted, f"ranks read each other's memory: {shared}, not {wanted}")
    return world


def _use_built_in_tables(ranks: int, device: str) -> None:
    """Which way a move goes is what is shown here, not what is fastest on ranks that take turns."""
    folder = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="consistent-tables-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for n in range(2, ranks + 1):
        for name in {device, table.cpu_device_name()}:
            table.save(table.Table(), n, name)


def _transports() -> str:
    """The layers that a move passes, outermost first."""
    names, layer = [], current()
    while layer is not None:
        names.append(type(layer).__name__)
        layer = getattr(layer, "inner", None)
    return " over ".join(names)
