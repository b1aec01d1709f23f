"""Ranks whose GPUs read each other's memory: torch.distributed._symmetric_memory, in one place."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .comm import Ranks, current


class Peers:
    """Memory on each rank's GPU that all of `ranks` read and write, and a barrier of their GPUs.

    Making it is a collective; `name` is one that only these ranks, this time, have. Raises
    RuntimeError where the GPUs don't reach each other.
    """

    def __init__(self, nbytes: int, device: torch.device, ranks: Ranks, at: int, name: str) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        store = c10d.PrefixStore(name, c10d._get_default_store())
        _SymmetricMemory.set_group_info(name, at, len(ranks), store)
        self._own = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._own, name)
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self.memory = [
            self._handle.get_buffer(k, (nbytes,), torch.uint8) for k in range(len(ranks))
        ]

    def begin(self) -> None:
        """Let what follows on this stream come after what was done on another one."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    def barrier(self, timeout_s: float) -> None:
        """What comes after it on any rank's stream sees what came before it on all of them."""
        self._handle.barrier(0, int(timeout_s * 1000))


def group_name(ranks: Ranks, kind: str) -> str | None:
    """The name of the process group of `ranks`, in this order, for torch's fused products
    (torch.ops.symm_mem), if their devices of this kind read each other's memory; else None.

    Only the group of the whole world has a name. The first call is a collective.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if ranks != tuple(range(dist.get_world_size())) or not current().shares(ranks, kind):
        return None
    from torch.distributed import _symmetric_memory  # noqa: F401  registers the ops; slow

    return c10d._get_default_group().group_name
