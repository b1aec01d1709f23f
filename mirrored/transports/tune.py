"""Measuring the table of a machine: `torchrun --nproc_per_node 4 -m mirrored.transports.tune`.

The first use of shared memory by so many ranks does the same, in less than a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True)
class Tried:
    """What a table is about: `shared` moves tensors of `ranks` on `device` in shared memory,
    `below` by messages; `name` says what the devices are."""

    shared: Transport
    below: Transport
    ranks: Ranks
    device: torch.device
    name: str
    set_one_shot: Callable[[int, int], None]  # bytes, and bytes of short floats


def agreed(it: Tried) -> Table:
    """The first member's table, or a new one measured by all, where it has none. A collective."""
    first = it.ranks[0] == it.shared.rank
    found = table.load(len(it.ranks), it.name) if first else None
    found = it.shared.gather_objects(found, it.ranks)[0]
    return measured(it) if found is None else found


def measured(it: Tried) -> Table:
    """A new table, from what the first member sees, and kept; the same on all. A collective.

    `it.shared` must move by shared memory whatever the size.
    """
    above = {}
    for name, move in _moves(it).items():
        for dtype in (torch.float32, torch.bfloat16):
            limit = _messages_above(it, move, dtype)
            if limit is not None:
                above[table.row(name, dtype)] = limit
    mine = Table(_one_shot(it, torch.float32), _one_shot(it, torch.bfloat16), above)
    found = it.shared.gather_objects(mine, it.ranks)[0]
    if it.ranks[0] == it.shared.rank:
        table.save(found, len(it.ranks), it.name)
    return found


def _moves(it: Tried) -> dict[str, Move]:
    """Each on a matrix with n columns and a multiple of n rows."""
    ranks, n, device = it.ranks, len(it.ranks), it.device

    def cut(size: int) -> list[int]:
        return [size // n] * n

    return {
        "all_reduce": lambda t, x: t.all_reduce(x, ranks),
        "reduce_scatter": lambda t, x: t.reduce_scatter(x, 0, cut(len(x)), ranks),
        "join": lambda t, x: t.join(x[: len(x) // n], 0, cut(len(x)), ranks),
        "turn": lambda t, x: t.turn(x[: len(x) // n], 1, [1] * n, 0, cut(len(x)), ranks),
        "broadcast": lambda t, x: t.broadcast(x, x.shape, x.dtype, device, ranks[0], ranks),
    }


def _one_shot(it: Tried, dtype: torch.dtype) -> int:
    """The size up to which sending all to all is the faster way."""
    limit = 0
    for nbytes in ONE_SHOT_SIZES:
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=it.device)
        spent = []
        for most in (ALWAYS, NEVER):
            it.set_one_shot(most, most)
            spent.append(_fastest(partial(it.shared.all_reduce, x, it.ranks), it.device, 10))
        # All sizes are tried by all, who do not see this rank's times.
        if spent[0] <= spent[1] and limit == nbytes // 2 * (nbytes > ONE_SHOT_SIZES[0]):
            limit = nbytes
    return limit


def _messages_above(it: Tried, move: Move, dtype: torch.dtype) -> int | None:
    """The size above which the transport below is clearly faster; None if it never is."""
    limit, n = None, len(it.ranks)
    for nbytes in SIZES:
        x = torch.ones(nbytes // dtype.itemsize // (n * n) * n, n, dtype=dtype, device=it.device)
        ways = it.shared, it.below
        ours, theirs = (_fastest(partial(move, way, x), it.device, 2) for way in ways)
        if theirs * CLEARLY > ours:
            limit = None
        elif limit is None:
            limit = nbytes // 2
    return limit


def _fastest(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Seconds a call, the best of three tries; as many calls on every rank."""
    best = float("inf")
    for _ in range(3):
        start = _now_s(device)
        for _ in range(count):
            call()
        best = min(best, (_now_s(device) - start) / count)
    return best


def _now_s(device: torch.device) -> float:
    """The time once what was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    from .layer import Layer

    transport = current()
    ranks = tuple(range(transport.size))
    while isinstance(transport, Layer):  # first the memory of devices, if there are any
        found = transport.tune(ranks)
        if transport.rank == 0:
            print(found or f"The ranks have no {type(transport).__name__}.")
        transport = transport.inner


if __name__ == "__main__":
    main()
