"""Stand-ins for GPUs that read each other's memory, for `stand_ins.py`: the memory is that of the
host, and what kernels and barriers do is noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from mirrored import Ranks, Transport
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.shared_memory import transport as shared
from mirrored.transports.symmetric_memory import device_moves
from mirrored.transports.symmetric_memory import transport as symmetric
from mirrored.transports.symmetric_memory.gpu_memory import GpuMemory
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.tuning.table import Table
from tests.mirrored.transports.symmetric_memory.host_memory import HostMemory
from tests.streams.noted import Log


class Meeting:
    """The place where ranks meet in the host's memory; each meeting is noted."""

    def __init__(self, place: Any, ranks: Ranks, log: Log) -> None:
        self._place, self._comm, self._log = place, f"host {ranks}", log

    def __getattr__(self, name: str) -> Any:
        if name.startswith("meet"):
            self._log.note("meet", "", (self._comm, self._log.count(self._comm), name))
        return getattr(self._place, name)


class Meetings(shared.SharedMemory):
    """Only meets in shared memory: tensors are on GPUs."""

    def __init__(self, inner: TorchDist, log: Log) -> None:
        super().__init__(inner)
        self._log, self._met = log, {}

    def group(self, ranks: Ranks) -> Any:
        place = super().group(ranks)
        return self._met.setdefault(ranks, place and Meeting(place, ranks, self._log))


for _name in Transport.__dict__:
    if _name in shared.SharedMemory.__dict__ and _name not in ("__init__", "shares", "overlaps"):
        setattr(Meetings, _name, getattr(Wrapper, _name))


class Peers(symmetric.SymmetricMemory):
    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        return super().shares(ranks, "cpu", nbytes)


@contextmanager
def reading_peers(below: Any, log: Log, cuda: Any) -> Iterator[Transport]:
    """The transport of ranks whose GPUs read each other's memory, over ``below``."""

    class Memory(GpuMemory):
        def __init__(
            self, nbytes: int, device: torch.device, ranks: Ranks, at: int, name: str
        ) -> None:
            self._device, self._last_collective, self._ranks = device, None, ranks
            with below.in_main_memory():
                self._host = HostMemory(nbytes, device, ranks, at, name)
            self.memory = self._host.memory

        def barrier(self, timeout_s: float) -> None:
            comm, stream = f"barrier {self._ranks}", cuda.current_stream().name
            log.note("barrier", stream, (comm, log.count(comm), ""))
            with below.in_main_memory():
                self._host.barrier(timeout_s)

    def kernel(name: str, out_at: int) -> Any:
        def launch(*args: Any) -> Any:
            stream = cuda.current_stream().name
            written = log.numbers([args[out_at]], stream)
            log.note("op", stream, name, reads=log.numbers(args[0], stream), writes=written)
            return getattr(made_of, name)(*args)

        return launch

    made_of = device_moves._C
    kernels = SimpleNamespace(reduce=kernel("reduce", 4), collect=kernel("collect", 1))
    with ExitStack() as stack:
        stack.enter_context(patch.object(device_moves, "_C", kernels))
        for module in (shared, symmetric):
            stack.enter_context(patch.object(module, "load_or_measure", lambda *_: Table()))
        yield Peers(Meetings(below, log), "cpu", make=Memory)
