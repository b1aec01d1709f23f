"""Divides the launched ranks into islands, each of which is a world (process group) of its own.

Islands train apart and seldom synchronize (``consistent/islands``). Ranks at the same place of each
island reach each other by a separate connection for that.

```
launched        rank 0   1   2   3        enter(2)
island 0             0   1                each rank's world has two ranks
island 1                     0   1
between         0 and 2, 1 and 3
```
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from ...codecs import Codec
from . import rejoin
from .launcher import destroy_group_of_process, init_from_environment


@dataclass(frozen=True)
class IslandPosition:
    """Position of this rank among the islands, and the store by which it connects to others.

    An island is a group of ranks that is a world of its own. ``enter`` and ``enter_as_island``
    return this object.

    Attributes:
        number: the number of this rank's island, counted from 0.
        count: how many islands there are.
        place: the rank of this process in its island.
        store: a store that all islands reach; None if there is one island.
        timeout_s: how long a rank waits for ranks of other islands.
    """

    number: int
    count: int
    place: int = 0
    store: Any = None
    timeout_s: float = 0.0

    def with_prefix(self, name: str) -> IslandPosition:
        """Return a copy whose store has keys of its own, under the prefix ``name``.

        Two users of one store call it, so that neither reads the keys of the other.
        """
        if self.store is None:
            return self
        return replace(self, store=c10d.PrefixStore(name, self.store))

    def connect(self, name: str, members: Sequence[int], limit_s: float) -> IslandConnection:
        """Connect the ranks that have this ``place`` in the islands ``members``; all call this.

        ``members`` are numbers of islands. ``name`` is the same for all of these ranks, and no
        other connection has it.

        Raises:
            RuntimeError: one of them does not call it within ``limit_s`` seconds.
        """
        if len(members) == 1:
            return IslandConnection(0, 1, None)
        store = c10d.PrefixStore(f"{name}/{self.place}", self.store)
        position, n = list(members).index(self.number), len(members)
        # Meet in the store first: gloo would wait `timeout_s` for a missing rank, not `limit_s`.
        store.set(f"here/{position}", "")
        store.wait([f"here/{k}" for k in range(n)], timedelta(seconds=limit_s))
        return IslandConnection(
            position,
            n,
            dist.ProcessGroupGloo(store, position, n, timedelta(seconds=self.timeout_s)),
        )


class IslandConnection:
    """Connection of one rank of each of several islands: those with the same rank in their island.

    ``IslandPosition.connect`` makes it; islands synchronize over it.

    Attributes:
        sent: bytes that this rank has sent over it.
    """

    def __init__(self, at: int, count: int, group: Any) -> None:
        self._position, self._count, self._group = at, count, group
        self.sent = 0

    def mean(self, x: Tensor, codec: Codec, divisor: int) -> Tensor:
        """Return the sum of ``x`` over the connected ranks over ``divisor``; same bits on all.

        Each rank adds up one part of the numbers, in the order of islands, and sends the means of
        that part to the others.

        Args:
            x: flat, on the CPU.
            codec: encodes the numbers that are sent.
            divisor: the number of islands whose ``x`` counts. Other islands pass zeros.
        """
        if self._group is None:
            return x.clone()
        part = -(-len(x) // self._count)
        padded = x.new_zeros(self._count, part)
        padded.view(-1)[: len(x)] = x
        encoded = torch.stack([codec.write(row) for row in padded])
        pieces = torch.empty_like(encoded)
        self._group.alltoall_base(pieces, encoded, [], []).wait()
        mean = codec.write(codec.read(list(pieces), part, x.dtype).div_(divisor))
        means = torch.empty_like(encoded)
        self._group._allgather_base(means.view(-1), mean).wait()
        self.sent += 2 * (self._count - 1) * len(mean)
        return torch.cat([codec.read([message], part, x.dtype) for message in means])[: len(x)]

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite ``x`` with the ``x`` of the rank at position ``source``: a broadcast.

        ``x`` is contiguous and on the CPU.
        """
        if self._group is not None and x.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            # As bytes: gloo does not send all dtypes that an optimizer's state may have.
            self._group.broadcast([x.view(-1).view(torch.uint8)], options).wait()
            self.sent += x.nbytes * (self._count - 1) if self._position == source else 0


def enter_as_island(number: int, count: int, endpoint: str, timeout_s: float) -> IslandPosition:
    """Make all ranks of this launch one island, where each island was launched separately.

    Args:
        number: the number of this island.
        count: how many islands there are.
        endpoint: host:port of the store that all islands reach.
        timeout_s: how long a rank waits for ranks of other islands.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    host, _, port = endpoint.rpartition(":")
    wait = timedelta(seconds=timeout_s)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        init_from_environment()
    place = dist.get_rank() if dist.is_initialized() else 0
    return IslandPosition(
        number, count, place, c10d.PrefixStore(f"islands/{count}", store), timeout_s
    )


def enter(count: int, timeout_s: float) -> IslandPosition:
    """Divide the launched ranks into ``count`` islands, and join this rank's island.

    Consecutive ranks of the launcher form an island, which is a process group. ``timeout_s`` is how
    long a rank waits for others, inside its island and between islands.

    Raises:
        RuntimeError: the process is in a process group already.
        ValueError: the launched ranks cannot be divided into ``count`` islands of one size.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "islands.join: torch.distributed is initialised already, and tensors may lie on its "
            "ranks. Call it first, before init_process_group and before the first global tensor."
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if count < 1 or size % count:
        raise ValueError(
            f"islands.join({count}): {size} ranks were launched, and islands have the same number "
            f"of ranks each. Give one of {_divisors(size)}."
        )
    if size == 1:
        return IslandPosition(0, 1)
    store, rank, size = next(rendezvous("env://"))
    number, place, ranks = rank * count // size, rank % (size // count), size // count
    island_store = c10d.PrefixStore(f"islands/{count}/{number}", store)
    rejoin.enter(island_store, place, ranks, timeout_s, may_lose_ranks=False)
    atexit.register(destroy_group_of_process, os.getpid())
    between_store = c10d.PrefixStore(f"islands/{count}/between", store)
    return IslandPosition(number, count, place, between_store if count > 1 else None, timeout_s)


def _divisors(n: int) -> Sequence[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
