"""Memory that the GPUs of several ranks share, by torch.distributed._symmetric_memory."""

from __future__ import annotations

import torch
import torch.distributed.distributed_c10d as c10d

from ...comm import Ranks


class GpuMemory:
    """Memory on each rank's GPU that all of `ranks` read and write, and a barrier of their GPUs.

    Making it is a collective. `name` must be the same on these ranks and used for nothing else.
    Raises RuntimeError if the GPUs cannot reach each other's memory.
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
        """Order what follows on the current stream after earlier moves on another stream."""
        stream = torch.cuda.current_stream(self._device)
        # Otherwise a slot could be written while kernels on the old stream still read it, and the
        # next barrier would tell the other GPUs that they have finished.
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    def barrier(self, timeout_s: float) -> None:
        """Work after it on any rank's current stream sees all work before it on every rank's.

        Without it a GPU would read a peer's slot before it is written, or write one that a peer
        still reads. Only the GPUs wait for each other: the call itself returns at once.
        """
        self._handle.barrier(0, int(timeout_s * 1000))
