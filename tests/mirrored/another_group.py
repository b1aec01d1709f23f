"""Another process group in the same processes, after one that was given up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mirrored.transports.default import current
from mirrored.transports.torch_dist import TorchDist


def another_group(rank: int, name: str, seconds: float = 0) -> None:
    """Put this rank, of two, into a process group of its own, over the store of the one before."""
    store: Any = c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    # By messages ranks wait until the time is up; in shared memory seldom.
    limit = timedelta(seconds=seconds or (6 if isinstance(current(), TorchDist) else 20))
    dist.destroy_process_group()
    store.set(f"{name}/{rank}", "")  # the other one may have waited in vain
    store.wait([f"{name}/0", f"{name}/1"], timedelta(seconds=30))
    again = c10d.PrefixStore(name, store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2, timeout=limit)
