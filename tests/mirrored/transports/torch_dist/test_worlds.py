"""A process group that is destroyed, and another one in the same processes, over the same store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import consistent
import mirrored
from consistent import Placement, S
from mirrored.transports.torch_dist.groups import world
from tests.mirrored.kinds import over_gloo
from tests.ranks import pool

TIMES = 10


def worlds(rank: int) -> list[Any]:
    """Ten worlds one after the other, every third without rank 2; and what is said in each of them
    of a rank that communicates nothing."""
    store: Any = c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    found: list[Any] = []
    for k in range(TIMES):
        dist.destroy_process_group()
        forget_torch(store, rank, k)
        size = 2 if k % 3 == 1 else 3
        if rank < size:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            found.append(one_world(rank, size))
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
            found.append(None)
    return found


def forget_torch(store: Any, rank: int, k: int) -> None:
    """Remove what torch has in the store, once all have left: gloo would connect to the addresses
    of the group before. What is the library's stays."""
    store.set(f"left/{k}/{rank}", "")
    if rank == 0:
        store.wait([f"left/{k}/{other}" for other in range(3)])
        for key in store.list_keys():
            if "mirrored" not in key and "left/" not in key:
                store.delete_key(key)
        store.set(f"left/{k}/all", "")
    store.wait([f"left/{k}/all"])


def one_world(rank: int, size: int) -> float:
    x = consistent.distribute(torch.arange(6.0), Placement("cpu", range(size)), S(0))
    total = x.sum().item()
    for pair in [(0, 1), (1, size - 1)]:
        if rank in pair and pair[0] != pair[1]:
            total += mirrored.all_reduce(torch.ones(100_000), pair)[7].item()
    watch = world().watch
    assert watch is not None
    deadline = time.monotonic() + 20
    while len(others := watch._directory.refresh(10.0)) < size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    said = watch._error_message("", "", *_asked(others))
    assert not re.search("has left|has ended|does not answer", said), said
    mirrored.current().gather_objects(0, tuple(range(size)))  # nobody leaves before all have asked
    return total


def _asked(others: Any) -> tuple[Any, Any]:
    from mirrored.transports.faults.wire import ask

    return others, ask(others, {"asks": "where", "rank": 99}, 5.0)


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_ten_worlds_of_one_process_do_not_take_each_other_for_themselves(where: str) -> None:
    pool(3).close()
    found = pool(3).run(over_gloo, worlds) if where == "gloo" else pool(3).run(worlds)
    pool(3).close()
    sums = [[15.0 + 2 * ((r in (0, 1)) + (r in (1, 2))) for r in range(3)]] * TIMES
    for k in range(TIMES):
        two = k % 3 == 1
        wanted = [17.0, 17.0, None] if two else sums[k]
        assert [each[k] for each in found] == wanted, k


def of_a_world_before(rank: int) -> list[str]:
    store: Any = c10d._get_default_store()
    x = consistent.distribute(torch.arange(6.0), Placement("cpu", [0, 1, 2]), S(0))
    said = []
    for size in (2, 0):
        dist.destroy_process_group()
        if size == 2 and rank < 2:
            dist.init_process_group(
                "gloo", store=c10d.PrefixStore("next", store), rank=rank, world_size=2
            )
        try:
            said.append(str(x.full()))
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if rank == 2:
            break
    return said


def test_a_tensor_of_a_world_that_is_gone_raises() -> None:
    pool(3).close()
    found = pool(3).run(of_a_world_before)
    pool(3).close()
    for said in found:
        for text in said:
            assert re.match("RuntimeError|ValueError", text), text


def interrupted(rank: int) -> list[Any]:
    """Ctrl-C where rank 0 waits breaks the group; another one in the same processes is whole."""
    store: Any = c10d._get_default_store()
    x = consistent.distribute(torch.arange(6.0), Placement("cpu", [0, 1]), S(0))
    found: list[Any] = [x.sum().item()]
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        store.wait(["interrupted"])  # rank 0 waits until then
    try:
        x.sum().item()
    except (RuntimeError, KeyboardInterrupt) as error:
        found.append(type(error).__name__)
        store.set("interrupted", "")
    dist.destroy_process_group()
    again = c10d.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    return [*found, x.sum().item()]


def test_after_an_interrupt_another_group_goes_on_in_the_same_processes() -> None:
    pool(2).close()
    found = pool(2).run(interrupted)
    pool(2).close()
    assert found == [[15.0, "KeyboardInterrupt", 15.0], [15.0, "RuntimeError", 15.0]]
