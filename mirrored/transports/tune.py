"""Measuring the table of a machine: `torchrun --nproc_per_node 4 -m mirrored.transports.tune`.

The first use of shared memory by so many ranks does the same, in less than a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm import Ranks, Transport, current
from . import table
from .table import Table

ONE_SHOT_SIZES = [2**k for k in range(12, 21)]  # 4 KiB to 1 MiB
SIZES = [2**18, 2**22]
CLEARLY = 1.2  # times faster, so that noise does not choose
NEVER, ALWAYS = 0, 1 << 62

Move = Callable[[Transport, Tensor], object]


def measure(shared: Transport, below: Transport, group: Any, ranks: Ranks) -> Table:
    """The table, from what the first of `ranks` sees; the same on all. A collective.

    `shared` moves by `group` whatever the size.
    """
    above = {}
    for name, move in _moves(len(ranks), ranks).items():
        for dtype in (torch.float32, torch.bfloat16):
            limit = _messages_above(move, shared, below, len(ranks), dtype)
            if limit is not None:
                above[table.row(name, dtype)] = limit
    mine = Table(_one_shot(group, torch.float32), _one_shot(group, torch.bfloat16), above)
    return shared.gather_objects(mine, ranks)[0]


def _moves(n: int, ranks: Ranks) -> dict[str, Move]:
    """Each on a matrix with n columns and a multiple of n rows."""

    def cut(size: int) -> list[int]:
        return [size // n] * n

    return {
        "all_reduce": lambda t, x: t.all_reduce(x, ranks),
        "reduce_scatter": lambda t, x: t.reduce_scatter(x, 0, cut(len(x)), ranks),
        "join": lambda t, x: t.join(x[: len(x) // n], 0, cut(len(x)), ranks),
        "turn": lambda t, x: t.turn(x[: len(x) // n], 1, [1] * n, 0, cut(len(x)), ranks),
        "broadcast": lambda t, x: t.broadcast(x, x.shape, x.dtype, "cpu", ranks[0], ranks),
    }


def _one_shot(group: Any, dtype: torch.dtype) -> int:
    """The size up to which sending all to all is the faster way."""
    limit = 0
    for nbytes in ONE_SHOT_SIZES:
        reduce = partial(group.all_reduce, torch.ones(nbytes // dtype.itemsize, dtype=dtype))
        spent = []
        for most in (ALWAYS, NEVER):
            group.set_one_shot(most, most)
            spent.append(_fastest(partial(reduce, "sum", False), 10))
        # All sizes are tried by all, who do not see this rank's times.
        if spent[0] <= spent[1] and limit == nbytes // 2 * (nbytes > ONE_SHOT_SIZES[0]):
            limit = nbytes
    return limit


def _messages_above(
    move: Move, shared: Transport, below: Transport, n: int, dtype: torch.dtype
) -> int | None:
    """The size above which the transport below is clearly faster; None if it never is."""
    limit = None
    for nbytes in SIZES:
        x = torch.ones(nbytes // dtype.itemsize // (n * n) * n, n, dtype=dtype)
        ours, theirs = (_fastest(partial(move, t, x), 2) for t in (shared, below))
        if theirs * CLEARLY > ours:
            limit = None
        elif limit is None:
            limit = nbytes // 2
    return limit


def _fastest(call: Callable[[], object], count: int) -> float:
    """Seconds a call, the best of three tries; as many calls on every rank."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def main() -> None:
    from .shared_memory import SharedMemory

    transport = current()
    assert isinstance(transport, SharedMemory), "the current transport does not share memory"
    ranks = tuple(range(transport.size))
    found = transport.tune(ranks)
    if transport.rank == 0:
        print(found or "The ranks do not share memory.")


if __name__ == "__main__":
    main()
