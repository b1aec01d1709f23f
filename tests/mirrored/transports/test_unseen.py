"""Ranks that find each other in their first call do so unseen by modes of the user's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.torch_dist import TorchDist
from tests.modes import Functions, Ops
from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_the_first_call_looks_like_the_second(rank: int) -> None:
    everyone = tuple(range(dist.get_world_size()))
    for mode in (Ops, Functions):
        transport, seen = SharedMemory(TorchDist()), list[list[str]]()
        for _ in range(2):
            seen.append([])
            with mode(seen[-1]):
                transport.all_reduce(torch.ones(3), everyone)
        assert seen[0] == seen[1]
