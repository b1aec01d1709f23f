"""Measures the table of a machine: which of two ways is faster for which move.

The first use of shared memory by a number of ranks does it, in less than a second. What is measured
while other programs keep the host busy is not kept, since it would send moves the slower way for
ever: the built-in table serves instead, and the next start measures again. To do it by hand:
`torchrun --nproc_per_node 4 -m mirrored.transports.tuning`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...comm import Ranks, Transport
from . import table
from .other_work import others_disturb, usage
from .table import Table

ONE_SHOT_SIZES = [2**k for k in range(12, 21)]  # 4 KiB to 1 MiB
SIZES = [2**18, 2**22]
COPIED = 2**25  # bytes
CLEARLY = 1.2  # how many times faster messages must be, so that noise does not decide
NEVER, ALWAYS = 0, 1 << 62

Move = Callable[[Transport, Tensor], object]


@dataclass(frozen=True)
class TwoWays:
    """The two ways that a table compares: `shared` moves tensors of `ranks` on `device` by shared
    memory, `messages` without it. `name` is the kind of device under which the table is kept."""

    shared: Transport
    messages: Transport
    ranks: Ranks
    device: torch.device
    name: str
    set_one_shot: Callable[[int, int], None]  # (limit in bytes, that for floats of two bytes)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose table all of them use."""
        return self.ranks[0] == self.shared.rank


def kept_or_measured(ways: TwoWays) -> Table:
    """The first member's table, or a new one measured by all if it has none. A collective."""
    found = table.load(len(ways.ranks), ways.name) if ways.is_first else None
    found = ways.shared.gather_objects(found, ways.ranks)[0]
    if found is not None:
        return found
    found, is_disturbed = measured(ways)
    if is_disturbed:
        return Table()
    _keep(found, ways)
    return found


def measured_by_hand(ways: TwoWays) -> Table:
    """A new table, which is kept even if other programs disturbed it. A collective."""
    found, is_disturbed = measured(ways)
    if is_disturbed and ways.is_first:
        warnings.warn(
            "other programs keep this host busy, so the table of transports that was measured and "
            "kept now may choose the slower way; measure it again once they have ended",
            stacklevel=2,
        )
    _keep(found, ways)
    return found


def _keep(found: Table, ways: TwoWays) -> None:
    if ways.is_first:
        table.save(found, len(ways.ranks), ways.name)


def measured(ways: TwoWays) -> tuple[Table, bool]:
    """A new table, of the first member's times, and whether other programs disturbed it; the same
    on all members. A collective.

    `ways.shared` must use shared memory for every size while this runs.
    """
    before, above = usage(), {}
    for name, move in _moves(ways).items():
        for dtype in (torch.float32, torch.bfloat16):
            limit = _messages_above(ways, move, dtype)
            if limit is not None:
                above[table.row(name, dtype)] = limit
    limits = _one_shot(ways, torch.float32), _one_shot(ways, torch.bfloat16)
    copies = _copy_start_s(ways), _copy_bytes_per_s(ways)
    mine = Table(*limits, above, _latency_s(ways), _bytes_per_s(ways), *copies)
    found = ways.shared.gather_objects((mine, usage() - before), ways.ranks)
    return found[0][0], others_disturb(found[0][1], [spent.process for _, spent in found])


def _moves(ways: TwoWays) -> dict[str, Move]:
    """The moves, each for a matrix with n columns and a multiple of n rows."""
    ranks, n, device = ways.ranks, len(ways.ranks), ways.device

    def cut(size: int) -> list[int]:
        return [size // n] * n

    return {
        "all_reduce": lambda t, x: t.all_reduce(x, ranks),
        "reduce_scatter": lambda t, x: t.reduce_scatter(x, 0, cut(len(x)), ranks),
        "join": lambda t, x: t.join(x[: len(x) // n], 0, cut(len(x)), ranks),
        "turn": lambda t, x: t.turn(x[: len(x) // n], 1, [1] * n, 0, cut(len(x)), ranks),
        "broadcast": lambda t, x: t.broadcast(x, x.shape, x.dtype, device, ranks[0], ranks),
    }


def _one_shot(ways: TwoWays, dtype: torch.dtype) -> int:
    """The size in bytes up to which an all-reduce is faster if every rank sends all of x to all."""
    limit = 0
    for nbytes in ONE_SHOT_SIZES:
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=ways.device)
        spent = []
        for most in (ALWAYS, NEVER):
            ways.set_one_shot(most, most)
            spent.append(_fastest(partial(ways.shared.all_reduce, x, ways.ranks), ways.device, 10))
        # All ranks must try all sizes, since the others do not know this rank's times.
        if spent[0] <= spent[1] and limit == nbytes // 2 * (nbytes > ONE_SHOT_SIZES[0]):
            limit = nbytes
    return limit


def _messages_above(ways: TwoWays, move: Move, dtype: torch.dtype) -> int | None:
    """The size in bytes above which messages are clearly faster; None if they never are."""
    limit, n = None, len(ways.ranks)
    for nbytes in SIZES:
        rows = nbytes // dtype.itemsize // (n * n) * n
        x = torch.ones(rows, n, dtype=dtype, device=ways.device)
        shared, messages = (
            _fastest(partial(move, way, x), ways.device, 2) for way in (ways.shared, ways.messages)
        )
        if messages * CLEARLY > shared:
            limit = None
        elif limit is None:
            limit = nbytes // 2
    return limit


def _latency_s(ways: TwoWays) -> float:
    x = torch.ones(1, device=ways.device)
    return _fastest(partial(ways.shared.all_reduce, x, ways.ranks), ways.device, 10)


def _bytes_per_s(ways: TwoWays) -> float:
    """The bytes that a rank sends in a second when all join their parts, each of which is sent to
    every other rank."""
    n, rows = len(ways.ranks), SIZES[-1] // torch.float32.itemsize // len(ways.ranks)
    x = torch.ones(rows, device=ways.device)
    join = partial(ways.shared.join, x, 0, [rows] * n, ways.ranks)
    return x.nbytes * (n - 1) / _fastest(join, ways.device, 2)


def _copy_start_s(ways: TwoWays) -> float:
    return _fastest(torch.ones(1, device=ways.device).clone, ways.device, 100)


def _copy_bytes_per_s(ways: TwoWays) -> float:
    """The bytes that a rank copies in a second, more than its caches hold."""
    x = torch.ones(COPIED // torch.float32.itemsize, device=ways.device)
    y = torch.empty_like(x)
    return x.nbytes / _fastest(partial(y.copy_, x), ways.device, 2)


def _fastest(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Seconds for each call, the best of three tries of `count` calls; the same on every rank."""
    best = float("inf")
    for _ in range(3):
        start = _now_s(device)
        for _ in range(count):
            call()
        best = min(best, (_now_s(device) - start) / count)
    return best


def _now_s(device: torch.device) -> float:
    """The time once the device has finished its work."""
    # Launches return at once: without it their time would be measured and not that of the moves.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
