"""Recorder of when the memory of a simulated process is allocated and freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .log import Held, Log

_Off = torch._C.DisableTorchFunction
_T = torch.Tensor


class Memory:
    """Recorder of when the memory of imagined tensors is allocated and freed."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._numbers: dict[int, int] = {}  # storage -> number
        self._refs: dict[int, Any] = {}
        self._owners: dict[int, tuple[int, int]] = {}  # number -> (rank, bytes)
        self._count = 0
        self._open = True

    def put(self, x: torch.Tensor, rank: int, message: bool = False) -> None:
        """Register the memory of the imagined tensor ``x`` as allocated by ``rank``.

        ``message`` says that ``x`` is the result of a message.
        """
        with _Off():
            storage = _T.untyped_storage(x)
            address = storage._cdata
            if address in self._numbers:
                return
            self._count += 1
            number, nbytes = self._count, storage.nbytes()
            self._numbers[address] = number
            self._owners[number] = rank, nbytes
            self._log.events.append(Held(rank, number, nbytes, message))
            # torch keeps one Python object for each storage, which ends when the memory is freed.
            self._refs[number] = weakref.ref(storage, lambda _: self._gone(address, number))

    def give(self, number: int, rank: int) -> None:
        """Transfer the memory ``number`` to ``rank``, which holds it from now on.

        A model is built before it is known which rank has which part of it.
        """
        before, nbytes = self._owners[number]
        if rank != before:
            self._owners[number] = rank, nbytes
            self._log.events += [Held(before, number, -nbytes), Held(rank, number, nbytes)]

    def number(self, x: torch.Tensor) -> int | None:
        """Return the number that identifies the memory of ``x``; None if ``x`` is a real tensor."""
        with _Off():
            if x.layout is not torch.strided:
                return None
            return self._numbers.get(_T.untyped_storage(x)._cdata)

    def close(self) -> None:
        """Stop logging, when the simulation has ended."""
        self._open = False

    def _gone(self, address: int, number: int) -> None:
        # The address may already belong to a newer storage.
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._refs.pop(number, None)
        rank, nbytes = self._owners.pop(number)
        if self._open:
            self._log.events.append(Held(rank, number, -nbytes))
