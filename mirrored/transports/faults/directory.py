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
# Seconds between two reads of missing addresses; doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 10.0


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

    ``address`` is that of this rank, ``own_rank``, and is written to the store for the others.
    """

    def __init__(self, own_rank: Rank, address: Address) -> None:
        self._rank, self._size = own_rank.rank, own_rank.size
        self._store: LimitedStore | None = own_rank.store
        self._addresses = {own_rank.rank: address}
        self._is_published = False
        self._pause_s = _FIRST_PAUSE_S

    def close(self) -> None:
        """Drop the reference to the store, so that it ends with the process group."""
        self._store = None

    def leave(self, limit_s: float) -> None:
        """Delete this rank's address from the store; wait at most ``limit_s`` seconds for that.

        A later process group over the same store would otherwise find it.
        """
        key, own_address = f"address/{self._rank}", self._addresses[self._rank]

        def delete_own(store: Any) -> None:
            # A later process group may have entered another address under this key already.
            if _read_address(store, self._rank) == own_address:
                store.delete_key(key)

        self._call_store(delete_own, limit_s)

    def known_addresses(self) -> dict[int, Address]:
        """Return the addresses of the other ranks that this process has read so far."""
        # Of a copy: the store's thread may add addresses meanwhile.
        return {
            rank: address for rank, address in self._addresses.copy().items() if rank != self._rank
        }

    def begin_refresh(self) -> float | None:
        """Begin to write this rank's address to the store and to read the others'; do not wait.

        Returns the number of seconds after which to call this again. None if all addresses are
        known, or after about 13 seconds of trying.
        """
        if self._store is None or (self._is_published and not self._missing_ranks()):
            return None
        with contextlib.suppress(RuntimeError):  # no threads at the end of the interpreter
            self._store.begin(self._publish_and_read)
        self._pause_s *= 2
        return self._pause_s if self._pause_s < _LAST_PAUSE_S else None

    def _publish_and_read(self, store: Any) -> None:
        if not self._is_published:
            store.set(f"address/{self._rank}", self._addresses[self._rank].dumps())
            self._is_published = True
        self._read_addresses(store, self._missing_ranks())

    def refresh(
        self, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> dict[int, Address]:
        """Return the addresses of the other ranks, read again from the store.

        ``check`` is called regularly while this waits. If it raises, or if the store does not
        answer within ``limit_s`` seconds, the result is what ``known_addresses`` returns.
        """

        others = [rank for rank in range(self._size) if rank != self._rank]
        self._call_store(lambda store: self._read_addresses(store, others), limit_s, check)
        return self.known_addresses()

    def _read_addresses(self, store: Any, ranks: list[int]) -> None:
        for rank in ranks:
            address = _read_address(store, rank)
            if address is not None:
                self._addresses[rank] = address

    def _call_store(
        self, call: Callable[[Any], None], limit_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Call ``call(store)``, and wait at most ``limit_s`` seconds; ignore all errors.

        ``check`` is called regularly meanwhile. If it raises, the wait ends.
        """
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.ask(call, limit_s, check)

    def _missing_ranks(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._addresses]


def _read_address(store: Any, rank: int) -> Address | None:
    """Return the address that ``rank`` has written to the store; None if there is none.

    It uses ``compare_set``, which does not block. ``store.get`` blocks while a key is absent, which
    it may become even after ``store.check``, if the rank deletes it in between.
    """
    text: bytes = store.compare_set(f"address/{rank}", _ABSENT, _ABSENT)
    return None if text == _ABSENT.encode() else Address.loads(text)
