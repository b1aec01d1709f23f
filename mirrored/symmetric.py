"""Ranks whose GPUs read each other's memory, for torch's fused products (torch.ops.symm_mem)."""

from __future__ import annotations

import torch.distributed as dist

from .comm import Ranks


def group_name(ranks: Ranks) -> str | None:
    """The name of the process group of `ranks`, in this order, if symmetric memory was enabled for
    it on all of them (`enable_symm_mem_for_group` of torch.distributed._symmetric_memory); else
    None. Only the group of the whole world has a name."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if ranks != tuple(range(dist.get_world_size())):
        return None
    from torch.distributed import _symmetric_memory as symmetric  # registers the ops; slow

    name = dist.distributed_c10d._get_default_group().group_name
    return name if symmetric.is_symm_mem_enabled_for_group(name) else None
