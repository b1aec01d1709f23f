"""Measures once, and stores on disk, the cost of messages between ranks that share no memory.

The ranks of a world measure it when they first meet, in a tenth of a second, and all use the
slowest rank's figures. Each host stores them, with a hash of the hosts between which they were
measured; between other hosts they are measured again. If other programs keep a host busy meanwhile,
the figures serve these ranks but are not stored. There is no built-in figure, because links between
hosts differ too much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ...comm import Link, Ranks, Transport
from . import table
from .measure import measure_costs, warn_of_others
from .other_work import Usage, others_disturb, usage
from .table import Table

# Each try is a single call, and the fastest counts: if other programs use the processors, a message
# waits until a processor is free, which says nothing about the link. A mean over several calls
# would include that time.
TRIES = 30


def load_or_measure(transport: Transport, ranks: Ranks, host: str) -> Link:
    """Return the cost of messages between ``ranks``. A collective.

    It is read from the table that the first of ``ranks`` has stored on disk, or else measured.

    Args:
        transport: sends the messages.
        ranks: the members.
        host: the name of this rank's host, which begins with the name of its machine.
    """
    own_table = table.load_stored(len(ranks), table.MESSAGES)
    notes = transport.gather_objects((own_table, host), ranks)
    names = [name for _, name in notes]
    agreed_table, is_disturbed = notes[0][0], False
    # A table that was measured between other hosts does not hold between these.
    if agreed_table is None or agreed_table.hosts not in ("", _hosts_hash(names)):
        agreed_table, is_disturbed = _measure_table(transport, ranks, names)
    if agreed_table != own_table and not is_disturbed:
        table.save(agreed_table, len(ranks), table.MESSAGES)
    return agreed_table.link


def measure_and_save(transport: Transport, ranks: Ranks, host: str) -> Table:
    """Measure the cost of messages between ``ranks``, store it on disk, and return it.

    A collective.

    The command ``python -m mirrored.transports.tuning`` calls it. Unlike ``load_or_measure`` it
    stores the result, with a warning, even if other programs disturbed the measurement.
    """
    measured_table, is_disturbed = _measure_table(
        transport, ranks, transport.gather_objects(host, ranks)
    )
    if is_disturbed and transport.rank == ranks[0]:
        warn_of_others("table of messages", "price them wrongly")
    table.save(measured_table, len(ranks), table.MESSAGES)
    return measured_table


def _measure_table(way: Transport, ranks: Ranks, names: Sequence[str]) -> tuple[Table, bool]:
    """Measure the cost of messages between ``ranks``. A collective.

    Returns (the table, whether other programs kept a host busy meanwhile), both the same on all
    ranks. ``names`` are the hosts of ``ranks``.
    """
    before = usage()
    own_prices = measure_costs(way, ranks, torch.device("cpu"), TRIES)
    notes = way.gather_objects((own_prices, usage() - before), ranks)
    latency, rate, start, copy = zip(*(figures for figures, _ in notes), strict=True)
    measured_table = Table(
        latency_s=max(latency), bytes_per_s=min(rate), copy_start_s=max(start),
        copy_bytes_per_s=min(copy), hosts=_hosts_hash(names),
    )  # fmt: skip
    usages_by_machine: dict[str, list[Usage]] = {}
    for (_, rank_usage), name in zip(notes, names, strict=True):
        # Grouped by machine, the first word of a host's name: /proc/stat counts all of a machine.
        usages_by_machine.setdefault(name.split()[0], []).append(rank_usage)
    return measured_table, any(
        others_disturb(machine_usages[0], [rank.process for rank in machine_usages])
        for machine_usages in usages_by_machine.values()
    )


def _hosts_hash(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(list(names)).encode()).hexdigest()[:24]
