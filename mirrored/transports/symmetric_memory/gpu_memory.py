"""Memory that the GPUs of several ranks share, by torch.distributed._symmetric_memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

from ...comm import Ranks
from .. import side_stream


class GpuMemory:
    """Memory on each rank's GPU that all of ``ranks`` read and write, and a barrier of their GPUs.

    Its constructor is a collective.

    Args:
        nbytes: the bytes of each rank's part.
        device: this rank's GPU.
        ranks: the members.
        at: the position of this rank in ``ranks``.
        name: a name that is the same on these ranks and used for nothing else.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(self, nbytes: int, device: torch.device, ranks: Ranks, at: int, name: str) -> None:
        self._group_and_store = register_group(name, at, len(ranks), c10d._get_default_store())
        self._own_memory = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._own_memory, name)
        self._device = device
        self._last_collective: Any = None  # (stream of the last collective, event at its end)
        self.memory = [
            self._handle.get_buffer(k, (nbytes,), torch.uint8) for k in range(len(ranks))
        ]

    def begin(self) -> None:
        """Let the current stream wait for the last collective, if that ran on another stream."""
        # Otherwise a slot could be written while kernels on the old stream still read it, and the
        # next barrier would tell the other GPUs that they have finished.
        if self._last_collective is not None:
            stream, event = self._last_collective
            current_stream = side_stream.cuda.current_stream(self._device)
            if current_stream != stream:
                current_stream.wait_event(event)

    def end(self) -> None:
        """Record an event at the end of a collective; one on another stream will wait for it."""
        stream = side_stream.cuda.current_stream(self._device)
        self._last_collective = stream, stream.record_event()

    def barrier(self, timeout_s: float) -> None:
        """Queue a barrier of all ranks' current streams.

        Work after it on any rank's stream sees all work before it on every rank's. Without it a GPU
        would read a peer's slot before it is written, or write a slot that a peer still reads. Only
        the GPUs wait for each other: the call itself returns at once.
        """
        self._handle.barrier(0, int(timeout_s * 1000))


def register_group(name: str, at: int, size: int, store: Store) -> tuple[ProcessGroup, Store]:
    """Register a group of ranks under ``name`` for ``_SymmetricMemory.rendezvous``.

    Args:
        name: the group's name, used for nothing else.
        at: this rank's position in the group.
        size: the number of ranks.
        store: the store by which the ranks exchange addresses.

    Returns:
        The group and its store. torch holds the group weakly, and of the store only the C++ part,
        so the caller must keep both for as long as the memory is used.
    """
    renumbered_store = RenumberedStore(PrefixStore(name, store))
    group = ProcessGroup(renumbered_store, at, size)
    _register_process_group(name, group)  # pyright: ignore[reportArgumentType]
    # Releases of torch from before January 2026 look here instead (pytorch#172163).
    _SymmetricMemory.set_group_info(name, at, size, renumbered_store)
    return group, renumbered_store


class RenumberedStore(Store):
    """Store for one rendezvous, in which torch's exchanges are numbered from 0 on every rank.

    Before the fix of pytorch#196082 torch numbers the keys ``prefix/number/rank`` by a counter of
    the process. If ranks 0 and 1 have made shared memory before, and then 0, 1 and 2 make some,
    their counters differ, and they would wait for keys that nobody sets.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._inner.set(self._renumbered_key(key), value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self._renumbered_key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        renumbered = [self._renumbered_key(key) for key in keys]
        self._inner.wait(renumbered, *(() if timeout is None else (timeout,)))

    def _renumbered_key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"
