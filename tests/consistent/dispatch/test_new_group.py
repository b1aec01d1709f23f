"""A process that was in another process group before plans like one that was not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import consistent
from consistent import Placement, S
from tests.launch import forks


def _be(groups: dict[str, int]) -> None:
    """Rank ``groups[path]`` of a group of two at each path, one group after the other."""
    torch.set_num_threads(1)
    for path, rank in groups.items():
        store = dist.FileStore(path, 2)
        wait = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
        x = consistent.distribute(torch.ones(4, 3), Placement("cpu", [0, 1]), S(0))
        for _ in range(6):  # more often than plain tensors are compared
            assert (x + torch.ones(4, 3)).sum().item() == 24.0
        dist.destroy_process_group()


def test_plans_of_the_group_before_are_forgotten(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    stays = forks().Process(target=_be, args=({first: 0, second: 0},))
    goes = forks().Process(target=_be, args=({first: 1},))
    comes = forks().Process(target=_be, args=({second: 1},))
    for process in (stays, goes, comes):
        process.start()
    try:
        for process in (stays, goes, comes):
            process.join(90)
            assert process.exitcode == 0
    finally:
        for process in (stays, goes, comes):
            process.kill()
            process.join()
