"""A world cut into islands: each is a world of its own, and ranks at the same place in each reach
each other by a thin connection of their own.

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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from . import rejoin
from .launcher import end_with_process, take_gpu


class Between:
    """The ranks at one place of all islands, one of each.

    Attributes:
        number: of this rank's island, counted from 0.
        count: how many islands there are.
        sent: bytes that this rank has sent to other islands.
    """

    def __init__(self, number: int, count: int, group: Any) -> None:
        self.number, self.count, self.sent = number, count, 0
        self._group = group

    def mean(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean over islands of ``x``, flat and on the CPU, in its dtype; the same bits on all.

        Numbers are sent in ``dtype``. Each island adds up a part of them, in the order of islands,
        and sends the others its means.
        """
        if self._group is None:
            return x.clone()
        part = -(-len(x) // self.count)
        given = x.new_zeros(part * self.count, dtype=dtype)
        given[: len(x)] = x
        pieces = torch.empty_like(given)
        self._wait(self._group.alltoall_base(pieces, given, [], []))
        mean = pieces.view(self.count, part).to(x.dtype).sum(0).div_(self.count).to(dtype)
        found = torch.empty_like(given)
        self._wait(self._group._allgather_base(found, mean))
        self.sent += 2 * (self.count - 1) * part * dtype.itemsize
        return found[: len(x)].to(x.dtype)

    def from_first(self, x: Tensor) -> None:
        """Overwrite ``x``, which is on the CPU, with what island 0 has."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self._wait(self._group.broadcast([x], options))
            self.sent += x.nbytes * (self.count - 1) if self.number == 0 else 0

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"islands: island {self.number} met another one that is gone, or that did not come "
                f"within the time-out of islands.join.\n  {error}\n"
                "  Start the job again, from a checkpoint."
            ) from error

    def alike(self, digest: bytes) -> list[bool]:
        """Whether each island's digest is this one's."""
        if self._group is None:
            return [True]
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        found = mine.new_empty(self.count * len(mine))
        self._wait(self._group._allgather_base(found, mine))
        return [torch.equal(mine, each) for each in found.view(self.count, -1)]


def enter(count: int, timeout_s: float) -> Between:
    """Join this rank's island, as the launcher's environment says. Consecutive ranks form one.

    Raises:
        RuntimeError: the process is in a process group already.
        ValueError: the launched ranks cannot be cut into so many islands of one size.
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
        return Between(0, 1, None)
    store, rank, size = next(rendezvous("env://"))
    number, place, ranks = rank * count // size, rank % (size // count), size // count
    take_gpu()
    inside = c10d.PrefixStore(f"islands/{count}/{number}", store)
    rejoin.enter(inside, place, ranks, timeout_s, is_first=True)
    atexit.register(end_with_process, os.getpid())
    if count == 1:
        return Between(0, 1, None)
    between = c10d.PrefixStore(f"islands/{count}/between/{place}", store)
    group = dist.ProcessGroupGloo(between, number, count, timedelta(seconds=timeout_s))
    return Between(number, count, group)


def _divisors(n: int) -> Sequence[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
