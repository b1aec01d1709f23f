"""Addresses at which the ranks' processes listen, exchanged through torch.distributed's store.

The store is the key-value server by which the ranks of a process group find each other. A process
reads the addresses when it starts, because when they are needed the store may be gone with the
process that held it. If it is not gone, they are read again. A process group that is made after
another one was destroyed may have the same store, so a rank that leaves deletes its address from
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .store import LimitedStore
from .wire import Address

_ABSENT = "absent"  # what `compare_set` returns, and does not enter, if a key is not there
_FIRST_S, _LAST_S = 0.05, 10.0  # seconds between two reads of missing addresses; doubled each time


@dataclass(frozen=True)
class Rank:
    """What a rank needs to find the others: its number, and torch.distributed's store.

    ``size`` is the number of ranks. ``store_host`` is the host of the store's server, or None if it
    is not known.
    """

    rank: int
    size: int
    store: LimitedStore
    store_host: str | None


class Directory:
    """Table of the addresses at which the ranks listen, filled from the store.

    ``address`` is that of this rank ``me``, and is written to the store for the others.
    """

    def __init__(self, me: Rank, address: Address) -> None:
        self._rank, self._size = me.rank, me.size
        self._store: LimitedStore | None = me.store
        self._known = {me.rank: address}
        self._entered = False
        self._pause = _FIRST_S

    def close(self) -> None:
        """Drop the reference to the store, so that it ends with the process group."""
        self._store = None

    def leave(self, limit_s: float) -> None:
        """Delete this rank's address from the store; wait at most ``limit_s`` seconds for that.

        A later process group over the same store would otherwise find it.
        """
        key, own = f"address/{self._rank}", self._known[self._rank]

        def take_out(store: Any) -> None:
            # A later process group may have entered another address under this key already.
            if _read(store, self._rank) == own:
                store.delete_key(key)

        self._in_time(take_out, limit_s)

    def known(self) -> dict[int, Address]:
        """Return the addresses of the other ranks that this process has read so far."""
        # Of a copy: the store's thread may add addresses meanwhile.
        return {rank: address for rank, address in self._known.copy().items() if rank != self._rank}

    def look(self) -> float | None:
        """Begin to write this rank's address to the store and to read the others'; do not wait.

        Returns the number of seconds after which to call this again. None if all addresses are
        known, or after about 13 seconds of trying.
        """
        if self._store is None or (self._entered and not self._missing()):
            return None
        with contextlib.suppress(RuntimeError):  # no threads at the end of the interpreter
            self._store.begin(self._enter_and_read)
        self._pause *= 2
        return self._pause if self._pause < _LAST_S else None

    def _enter_and_read(self, store: Any) -> None:
        if not self._entered:
            store.set(f"address/{self._rank}", self._known[self._rank].dumps())
            self._entered = True
        self._read_in(store, self._missing())

    def find(self, limit_s: float, check: Callable[[], None] = lambda: None) -> dict[int, Address]:
        """Return the addresses of the other ranks, read again from the store.

        ``check`` is called regularly while this waits. If it raises, or if the store does not
        answer within ``limit_s`` seconds, the result is what ``known`` returns.
        """

        others = [rank for rank in range(self._size) if rank != self._rank]
        self._in_time(lambda store: self._read_in(store, others), limit_s, check)
        return self.known()

    def _read_in(self, store: Any, ranks: list[int]) -> None:
        for rank in ranks:
            found = _read(store, rank)
            if found is not None:
                self._known[rank] = found

    def _in_time(
        self, ask: Callable[[Any], None], limit_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Call ``ask(store)``, and wait at most ``limit_s`` seconds; ignore all errors.

        ``check`` is called regularly meanwhile. If it raises, the wait ends.
        """
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.ask(ask, limit_s, check)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._known]


def _read(store: Any, rank: int) -> Address | None:
    """Return the address that ``rank`` has written to the store; None if there is none.

    It uses ``compare_set``, which does not block. ``store.get`` blocks while a key is absent, which
    it may become even after ``store.check``, if the rank deletes it in between.
    """
    found: bytes = store.compare_set(f"address/{rank}", _ABSENT, _ABSENT)
    return None if found == _ABSENT.encode() else Address.loads(found)
