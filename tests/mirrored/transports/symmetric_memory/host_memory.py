"""Memory of one host in the place of memory that GPUs share, for `SymmetricMemory(make=...)`."""

from __future__ import annotations

import os

import torch

from mirrored import Ranks
from mirrored.transports.torch_dist import TorchDist


class HostMemory:
    """What `GpuMemory` is for GPUs; the ranks' barrier is a round of messages."""

    def __init__(self, nbytes: int, device: torch.device, ranks: Ranks, at: int, name: str) -> None:
        self._messages, self._ranks = TorchDist(), ranks
        paths = [f"/dev/shm/{name.replace('/', '-')}-{k}" for k in range(len(ranks))]
        with open(paths[at], "wb") as file:
            file.truncate(nbytes)
        self.barrier(0)
        self.memory = [
            torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths
        ]
        self.barrier(0)
        os.unlink(paths[at])

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def barrier(self, timeout_s: float) -> None:
        self._messages.gather_objects(None, self._ranks)
