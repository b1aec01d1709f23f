"""Finds the process group in which torch's ops that fuse a collective with a matmul can run."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...comm import Ranks
from ..default import current


def group_name(ranks: Ranks, kind: str) -> str | None:
    """Return the name of the process group of ``ranks``, as the ops of torch.ops.symm_mem take it.

    These ops fuse a collective with a matmul. Returns None if they cannot run: the ranks' devices
    of this ``kind`` do not read each other's memory, or ``ranks`` are not the whole world in order.
    The first call is a collective.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if ranks != tuple(range(dist.get_world_size())) or not current().shares(ranks, kind):
        return None
    from torch.distributed import _symmetric_memory  # noqa: F401  registers the ops; slow

    return c10d._get_default_group().group_name
