"""Measures a machine's table: whether shared memory or messages are faster for a collective.

The ranks of a group measure it in their first use of shared memory, in less than a second. If other
programs keep the host busy meanwhile the table is not stored, since it would select the slower way
for ever: the built-in table is used instead, and the next start measures again. To measure by hand:
``torchrun --nproc_per_node 4 -m mirrored.transports.tuning``.
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
COPY_BYTES = 2**25  # bytes
CLEAR_FACTOR = 1.2  # how many times faster messages must be, so that noise does not decide
NEVER, ALWAYS = 0, 1 << 62  # limits in bytes for an all-reduce in one step

Move = Callable[[Transport, Tensor], object]


@dataclass(frozen=True)
class TwoWays:
    """The two transports whose times are compared, to choose one for each collective and size.

    ``shared`` moves tensors of ``ranks`` on ``device`` by shared memory, ``messages`` without it.
    The results are stored in a table under ``name``, the model of the device. ``set_one_shot`` sets
    the sizes up to which ``shared`` does an all-reduce in one step, in which every rank reads all
    ranks' tensors.
    """

    shared: Transport
    messages: Transport
    ranks: Ranks
    device: torch.device
    name: str
    set_one_shot: Callable[[int, int], None]  # (limit in bytes, limit for floats of two bytes)

    @property
    def is_first(self) -> bool:
        """True on the first of ``ranks``, whose table all of them use."""
        return self.ranks[0] == self.shared.rank


def load_or_measure(ways: TwoWays, may_measure: bool) -> Table:
    """Return the table that is stored on the first rank's machine, or else measure one.

    A collective over ``ways.ranks``. The result is the built-in table if none is stored and the
    ranks may not measure, or if other programs disturbed the measurement.
    """
    agreed_table = table.load(len(ways.ranks), ways.name) if ways.is_first else None
    agreed_table = ways.shared.gather_objects(agreed_table, ways.ranks)[0]
    if agreed_table is not None or not may_measure:
        return agreed_table or Table()
    agreed_table, is_disturbed = measure(ways)
    if is_disturbed:
        return Table()
    _save_on_first_rank(agreed_table, ways)
    return agreed_table


def measure_and_save(ways: TwoWays) -> Table:
    """Measure a table, store it on disk, and return it. A collective.

    The command ``python -m mirrored.transports.tuning`` calls it. Unlike ``load_or_measure`` it
    stores the result, with a warning, even if other programs disturbed the measurement.
    """
    measured_table, is_disturbed = measure(ways)
    if is_disturbed and ways.is_first:
        warn_of_others("table of transports", "choose the slower way")
    _save_on_first_rank(measured_table, ways)
    return measured_table


def warn_of_others(name: str, effect: str) -> None:
    """Warn that other programs ran while a table was measured.

    ``name`` is what the table is called in the warning, and ``effect`` what it may do wrongly, such
    as "choose the slower way".
    """
    warnings.warn(
        f"other programs keep this host busy, so the {name} that was measured and kept now may "
        f"{effect}; measure it again once they have ended",
        stacklevel=3,
    )


def _save_on_first_rank(measured_table: Table, ways: TwoWays) -> None:
    if ways.is_first:
        table.save(measured_table, len(ways.ranks), ways.name)


def measure(ways: TwoWays) -> tuple[Table, bool]:
    """Measure a table; return it and whether other programs disturbed it. A collective.

    Both results are the same on all ranks: the table has the times of the first one. The caller
    lets ``ways.shared`` use shared memory for every size while this runs.
    """
    before, limits_above = usage(), {}
    for name, move in _timed_collectives(ways).items():
        for dtype in (torch.float32, torch.bfloat16):
            limit = _messages_limit(ways, move, dtype)
            if limit is not None:
                limits_above[table.row_key(name, dtype)] = limit
    own_limits = _one_shot_limit(ways, torch.float32), _one_shot_limit(ways, torch.bfloat16)
    # The cost of small messages is measured in the way that they will be sent, which is the same on
    # all members.
    limits: tuple[int, int] = ways.shared.gather_objects(own_limits, ways.ranks)[0]
    ways.set_one_shot(*limits)
    own_table = Table(*limits, limits_above, *measure_costs(ways.shared, ways.ranks, ways.device))
    results = ways.shared.gather_objects((own_table, usage() - before), ways.ranks)
    return results[0][0], others_disturb(results[0][1], [spent.process for _, spent in results])


def _timed_collectives(ways: TwoWays) -> dict[str, Move]:
    """Return the collectives to time: name -> function of (transport, x).

    For n ranks, x is a matrix of n columns and a multiple of n rows.
    """
    ranks, n, device = ways.ranks, len(ways.ranks), ways.device

    def even_sizes(size: int) -> list[int]:
        return [size // n] * n

    return {
        "all_reduce": lambda t, x: t.all_reduce(x, ranks),
        "reduce_scatter": lambda t, x: t.reduce_scatter(x, 0, even_sizes(len(x)), ranks),
        "all_gather_into_tensor": lambda t, x: t.all_gather_into_tensor(
            x[: len(x) // n], 0, even_sizes(len(x)), ranks
        ),
        "all_to_all_single": lambda t, x: t.all_to_all_single(
            x[: len(x) // n], 1, [1] * n, 0, even_sizes(len(x)), ranks
        ),
        "broadcast": lambda t, x: t.broadcast(x, x.shape, x.dtype, device, ranks[0], ranks),
    }


def _one_shot_limit(ways: TwoWays, dtype: torch.dtype) -> int:
    """Return the size in bytes up to which an all-reduce is faster in one step than in parts.

    In one step every rank reads the whole tensor of every rank.
    """
    limit = 0
    for nbytes in ONE_SHOT_SIZES:
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=ways.device)
        seconds = []
        for forced_limit in (ALWAYS, NEVER):
            ways.set_one_shot(forced_limit, forced_limit)
            seconds.append(
                _best_seconds(partial(ways.shared.all_reduce, x, ways.ranks), ways.device, 10)
            )
        # No early exit: the other ranks do not know this rank's times, so all must try all sizes.
        # The limit grows only while one shot was faster at every smaller size, too.
        if seconds[0] <= seconds[1] and limit == nbytes // 2 * (nbytes > ONE_SHOT_SIZES[0]):
            limit = nbytes
    return limit


def _messages_limit(ways: TwoWays, move: Move, dtype: torch.dtype) -> int | None:
    """Return the size in bytes above which messages are clearly faster; None if they never are.

    ``move`` is one of the collectives of ``_timed_collectives``. "Clearly" means by a factor of
    1.2.
    """
    limit, n = None, len(ways.ranks)
    for nbytes in SIZES:
        rows = nbytes // dtype.itemsize // (n * n) * n
        x = torch.ones(rows, n, dtype=dtype, device=ways.device)
        shared, messages = (
            _best_seconds(partial(move, way, x), ways.device, 2)
            for way in (ways.shared, ways.messages)
        )
        if messages * CLEAR_FACTOR > shared:
            # Messages must be faster at every larger size, too: start over.
            limit = None
        elif limit is None:
            limit = nbytes // 2
    return limit


def measure_costs(
    transport: Transport, ranks: Ranks, device: torch.device, tries: int = 3
) -> tuple[float, float, float, float]:
    """Measure this rank's cost of messages sent by ``transport``, and of copies. A collective.

    Args:
        transport: sends the messages.
        ranks: the members.
        device: the device of the tensors.
        tries: number of measurements, of which the fastest counts. Together they send 30 small
            messages, and 6 large ones in at most 6 measurements.

    Returns:
        The table's ``latency_s``, ``bytes_per_s``, ``copy_start_s`` and ``copy_bytes_per_s``.
    """
    scalar, buffer = torch.ones(1, device=device), _ones_of_bytes(COPY_BYTES, device)
    latency = _best_seconds(
        partial(transport.all_reduce, scalar, ranks), device, 30 // tries, tries
    )
    rate = _bytes_per_s(transport, ranks, device, min(tries, 6))
    start = _best_seconds(scalar.clone, device, 100)
    copy = _best_seconds(partial(torch.empty_like(buffer).copy_, buffer), device, 2)
    return latency, rate, start, buffer.nbytes / copy


def _bytes_per_s(way: Transport, ranks: Ranks, device: torch.device, tries: int) -> float:
    """Return the bytes that a rank sends in a second in an all-gather of large parts by ``way``."""
    n = len(ranks)
    x = _ones_of_bytes(SIZES[-1] // n, device)
    gather = partial(way.all_gather_into_tensor, x, 0, [len(x)] * n, ranks)
    return x.nbytes * (n - 1) / _best_seconds(gather, device, 6 // tries, tries)


def _ones_of_bytes(nbytes: int, device: torch.device) -> Tensor:
    return torch.ones(nbytes // torch.float32.itemsize, device=device)


def _best_seconds(
    call: Callable[[], object], device: torch.device, count: int, tries: int = 3
) -> float:
    """Return the seconds of one ``call()``: the mean of ``count`` calls, the best of ``tries``.

    The number of calls is the same on every rank, since ``call`` may be a collective.
    """
    best = float("inf")
    for _ in range(tries):
        start = _now_s(device)
        for _ in range(count):
            call()
        best = min(best, (_now_s(device) - start) / count)
    return best


def _now_s(device: torch.device) -> float:
    """Return the time once the device has finished its work."""
    # Launches return at once: without this only their time would be measured.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
