"""The world in order has a name for torch's products, where its ranks read each other's memory."""

from __future__ import annotations

import torch.distributed as dist

from mirrored import use
from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.symmetric_memory.torch_group import group_name
from mirrored.transports.torch_dist import TorchDist
from tests.ranks import pool


def _names(rank: int) -> list[bool]:
    with use(SharedMemory(TorchDist())):
        name = group_name((0, 1), "cpu")
        assert name == dist.group.WORLD.group_name  # type: ignore[union-attr]
        asked = [((0, 1), "cuda"), ((1, 0), "cpu"), ((rank,), "cpu")]
        return [group_name(ranks, kind) is None for ranks, kind in asked]


def test_only_the_group_of_the_world_in_order_has_a_name() -> None:
    assert pool(2).run(_names) == [[True, True, True]] * 2


def test_without_process_groups_there_is_none() -> None:
    assert dist.is_initialized() or group_name((0,), "cpu") is None
