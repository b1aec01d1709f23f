"""Only the world in order, and only where it was enabled, has symmetric memory."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from mirrored.symmetric import group_name
from tests.ranks import pool


def _names(rank: int) -> list[bool]:
    asked = [(0, 1), (1, 0), (0,)]
    before = [group_name(ranks) is None for ranks in asked]
    with symmetric._test_mode():  # says that it was enabled
        assert group_name((0, 1)) == dist.group.WORLD.group_name  # type: ignore[union-attr]
        return [*before, *(group_name(ranks) is None for ranks in asked)]


def test_only_the_group_of_the_world_in_order_has_a_name_once_enabled() -> None:
    assert pool(2).run(_names) == [[True, True, True, False, True, True]] * 2


def test_without_process_groups_there_is_none() -> None:
    assert dist.is_initialized() or group_name((0,)) is None
