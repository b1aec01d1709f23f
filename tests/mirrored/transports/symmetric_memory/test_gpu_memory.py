"""What memory of GPUs asks of torch before a GPU is needed, and of streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from mirrored.transports import side_stream
from mirrored.transports.symmetric_memory.gpu_memory import (
    GpuMemory,
    RenumberedStore,
    register_group,
)


def test_torch_finds_the_ranks_by_the_name_of_their_memory() -> None:
    kept = register_group("mirrored/a name", 1, 3, dist.HashStore())
    found = _resolve_process_group("mirrored/a name")
    assert (found.rank(), found.size()) == (1, 3) and found is kept[0]


def exchange(store: dist.Store, number: int, rank: int) -> None:
    """The keys of one exchange of torch's StoreExchange, by a counter of the process."""
    store.set(f"CUDASymmetricMemory-SymmMem/{number}/{rank}", bytes([0, rank, 255]))


def test_ranks_that_have_met_others_before_find_each_other() -> None:
    below = dist.HashStore()
    stores = [RenumberedStore(below) for _ in range(2)]
    ranks = [dist.PrefixStore("as torch may wrap it", store) for store in stores]
    counters = (0, 7)
    for step in range(3):
        for rank in range(2):
            exchange(ranks[rank], counters[rank] + step, rank)
        for rank in range(2):
            key = f"CUDASymmetricMemory-SymmMem/{counters[rank] + step}/{1 - rank}"
            ranks[rank].wait([key])
            assert ranks[rank].get(key) == bytes([0, 1 - rank, 255])


def test_a_step_on_another_stream_waits_for_the_last_step_and_not_for_later_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.done = name, 0

        def record_event(self) -> str:
            return f"{self.name} after {self.done} kernels"

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

    program, side = Stream("program"), Stream("side")
    memory: Any = object.__new__(GpuMemory)
    memory._device, memory._last_collective = torch.device("cuda", 0), None
    for stream, kernels in ((program, 2), (program, 3), (side, 1), (side, 1), (program, 1)):
        cuda = SimpleNamespace(current_stream=lambda device, stream=stream: stream)
        monkeypatch.setattr(side_stream, "cuda", cuda)
        memory.begin()
        stream.done += kernels
        memory.end()
        stream.done += 10  # what the program computes meanwhile
    assert log == [
        "side waits for program after 15 kernels",
        "program waits for side after 12 kernels",
    ]
