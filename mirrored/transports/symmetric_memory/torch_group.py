"""Finds the process group by whose name torch's fused products (torch.ops.symm_mem) run."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...comm import Ranks
from ..default import current


def group_name(ranks: Ranks, kind: str) -> str | None:
    """Return the name of the process group of ``ranks``, for torch's fused products.

    These are the ops of torch.ops.symm_mem. Returns None if the ranks' devices of this kind do not
    read each other's memory, or if ``ranks`` are not the whole world in order. The first call is a
    collective.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if ranks != tuple(range(dist.get_world_size())) or not current().shares(ranks, kind):
        return None
    from torch.distributed import _symmetric_memory  # noqa: F401  registers the ops; slow

    return c10d._get_default_group().group_name
