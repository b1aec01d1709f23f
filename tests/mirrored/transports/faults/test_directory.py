"""Addresses of ranks in a store, some of which leave meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from mirrored.transports.faults.directory import Directory, Rank
from mirrored.transports.faults.store import LimitedStore
from mirrored.transports.faults.wire import Address


class Leaving:
    """A store from which a key is deleted once somebody has seen that it is there."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()

    def check(self, keys: list[str]) -> bool:
        found = self.inner.check(keys)
        for key in keys:
            self.inner.delete_key(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def address(rank: int) -> Address:
    return Address("127.0.0.1", 1000 + rank, f"secret {rank}", 1, "1")


@pytest.mark.parametrize(
    "call",
    [lambda it: it.refresh(20.0), lambda it: it.begin_refresh(), lambda it: it.leave(20.0)],
    ids=["find", "look", "leave"],
)
def test_a_rank_that_leaves_meanwhile_is_not_waited_for(call: Callable[[Directory], Any]) -> None:
    store = Leaving()
    for rank in range(2):
        store.inner.set(f"address/{rank}", address(rank).dumps())
    limited = LimitedStore(store, 30.0)
    directory = Directory(Rank(0, 2, limited, None), address(0))
    begin = time.monotonic()
    call(directory)
    # Calls come one after another: the next one has its turn.
    limited.ask(lambda store: store.set("next", "call"), 20.0)
    assert time.monotonic() - begin < 10


def test_addresses_are_found_and_taken_out() -> None:
    store = dist.HashStore()
    limited = LimitedStore(store, 30.0)
    directories = [Directory(Rank(rank, 3, limited, None), address(rank)) for rank in range(3)]
    for rank in (0, 1):
        store.set(f"address/{rank}", address(rank).dumps())
    assert directories[0].refresh(20.0) == {1: address(1)}
    store.set("address/1", address(2).dumps())  # that of a later process group
    directories[1].leave(20.0)
    assert directories[0].refresh(20.0) == {1: address(2)}
    directories[0].leave(20.0)
    assert directories[1].refresh(20.0) == {}
