"""Recorder of when the memory of a simulated process is allocated and freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .log import Log, MemoryEvent

_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor


class Memory:
    """Recorder that logs when the memory of imagined tensors is allocated and freed.

    Each memory (storage) gets a number. Views of one storage have the same number.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._numbers: dict[int, int] = {}  # storage -> number
        self._refs: dict[int, Any] = {}
        self._allocations: dict[int, MemoryEvent] = {}  # number -> the event of its allocation
        self._count = 0
        self._is_logging = True

    def register(self, x: torch.Tensor, rank: int, message: bool = False) -> None:
        """Register the memory of the imagined tensor ``x`` as allocated by ``rank``.

        ``message`` says that ``x`` is the result of a message.
        """
        with _DisableTorchFunction():
            storage = _T.untyped_storage(x)
            address = storage._cdata
            if address in self._numbers:
                return
            self._count += 1
            number = self._count
            self._numbers[address] = number
            self._allocations[number] = MemoryEvent(rank, number, storage.nbytes(), message)
            self._log.events.append(self._allocations[number])
            # torch keeps one Python object for each storage, which ends when the memory is freed.
            self._refs[number] = weakref.ref(storage, lambda _: self._log_free(address, number))

    def set_rank(self, number: int, rank: int) -> None:
        """Attribute the memory ``number`` to ``rank``, from its allocation on.

        A tensor is made before it is known of which placement it is a shard, and so before its rank
        is known.
        """
        self._allocations[number].rank = rank

    def rank_of(self, x: torch.Tensor) -> int | None:
        """Return the rank that holds the memory of ``x``; None if ``x`` is a real tensor."""
        number = self.number(x)
        return None if number is None else self._allocations[number].rank

    def number(self, x: torch.Tensor) -> int | None:
        """Return the number that identifies the memory of ``x``; None if ``x`` is a real tensor."""
        with _DisableTorchFunction():
            if x.layout is not torch.strided:
                return None
            return self._numbers.get(_T.untyped_storage(x)._cdata)

    def close(self) -> None:
        """Stop logging, when the simulation has ended."""
        self._is_logging = False

    def _log_free(self, address: int, number: int) -> None:
        # The address may already belong to a newer storage.
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._refs.pop(number, None)
        allocation = self._allocations.pop(number)
        if self._is_logging:
            self._log.events.append(MemoryEvent(allocation.rank, number, -allocation.bytes))
