"""What a rank asks of its GPU in a step, in the order in which the process asks for it.

Each event names a stream, and memory by a number. `orders.py` reads such a list.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Off = torch._C.DisableTorchFunction


class Event(NamedTuple):
    """One thing that was asked for.

    Args:
        kind: "op"; "record", "wait" of an event, named by ``what``; "start" of a collective and
            "join", the stream's wait for its end; "meet", a collective that the process itself
            waits for; "made", "held" (`record_stream`) and "freed" memory; "sync", the process
            waits for the stream.
        stream: where; "" if nowhere.
        what: the op, event, or collective as (communicator, number, what all ranks must agree on).
        reads, writes: numbers of memory.
    """

    kind: str
    stream: str = ""
    what: Any = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


class Log:
    """The events of a rank. Memory is known by weak references, so none lives longer for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}  # address of a storage -> number
        self._refs: dict[int, Any] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()
        self.open = True

    def note(self, kind: str, stream: str = "", what: Any = None, **memory: Iterable[int]) -> None:
        """Add an event, unless the log is closed."""
        if self.open:
            self.events.append(
                Event(kind, stream, what, **{key: tuple(ids) for key, ids in memory.items()})
            )

    def count(self, name: str) -> int:
        """How often it was asked for this name before."""
        with self._lock:
            self._counts[name] = self._counts.get(name, -1) + 1
            return self._counts[name]

    def numbers(self, tensors: Iterable[Any], stream: str) -> tuple[int, ...]:
        """The numbers of their memory; what is not known yet was made on ``stream``."""
        return tuple(dict.fromkeys(n for x in tensors for n in self._number(x, stream)))

    def _number(self, x: Tensor, stream: str) -> Iterable[int]:
        with Off(), self._lock:
            if x.layout is not torch.strided or x.is_meta:
                return
            storage = Tensor.untyped_storage(x)
            address = storage._cdata
            if address not in self._numbers:
                number = self.count("memory")
                self._numbers[address] = number
                self.note("made", stream, writes=(number,))
                self._refs[number] = weakref.ref(storage, lambda _: self._gone(address, number))
            yield self._numbers[address]

    def _gone(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._refs.pop(number, None)
        self.note("freed", writes=(number,))
