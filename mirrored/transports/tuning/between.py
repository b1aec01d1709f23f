"""Measures once, and stores, the cost of messages between ranks that share no memory.

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
from .measure import prices, warn_of_others
from .other_work import Usage, others_disturb, usage
from .table import Table

# Each try is a single call, and the fastest counts: if other programs use the processors, a message
# waits until a processor is free, which says nothing about the link. A mean over several calls
# would include that time.
TRIES = 30


def kept_or_measured(way: Transport, ranks: Ranks, host: str) -> Link:
    """Return the cost of messages between ``ranks``. A collective.

    It comes from the table that the first of ``ranks`` has stored, or else is measured.

    Args:
        way: the transport that sends the messages.
        ranks: the members.
        host: the name of this rank's host, which begins with the name of its machine.
    """
    mine = table.kept(len(ranks), table.MESSAGES)
    told = way.gather_objects((mine, host), ranks)
    names = [name for _, name in told]
    found, is_disturbed = told[0][0], False
    # A table that was measured between other hosts does not hold between these.
    if found is None or found.hosts not in ("", _short(names)):
        found, is_disturbed = _measured(way, ranks, names)
    if found != mine and not is_disturbed:
        table.save(found, len(ranks), table.MESSAGES)
    return found.link


def measured_by_hand(way: Transport, ranks: Ranks, host: str) -> Table:
    """Measure the cost of messages between ``ranks``, store and return it. A collective.

    The command ``python -m mirrored.transports.tuning`` calls it. Unlike ``kept_or_measured`` it
    stores the result, with a warning, even if other programs disturbed the measurement.
    """
    found, is_disturbed = _measured(way, ranks, way.gather_objects(host, ranks))
    if is_disturbed and way.rank == ranks[0]:
        warn_of_others("table of messages", "price them wrongly")
    table.save(found, len(ranks), table.MESSAGES)
    return found


def _measured(way: Transport, ranks: Ranks, names: Sequence[str]) -> tuple[Table, bool]:
    """Measure the cost of messages between ``ranks``. A collective.

    Returns (the table, whether other programs kept a host busy meanwhile), both the same on all
    ranks. ``names`` are the hosts of ``ranks``.
    """
    before = usage()
    own = prices(way, ranks, torch.device("cpu"), TRIES)
    told = way.gather_objects((own, usage() - before), ranks)
    latency, rate, start, copy = zip(*(figures for figures, _ in told), strict=True)
    found = Table(
        latency_s=max(latency), bytes_per_s=min(rate), copy_start_s=max(start),
        copy_bytes_per_s=min(copy), hosts=_short(names),
    )  # fmt: skip
    spent: dict[str, list[Usage]] = {}
    for (_, usages), name in zip(told, names, strict=True):
        # Grouped by machine, the first word of a host's name: /proc/stat counts all of a machine.
        spent.setdefault(name.split()[0], []).append(usages)
    return found, any(
        others_disturb(each[0], [rank.process for rank in each]) for each in spent.values()
    )


def _short(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(list(names)).encode()).hexdigest()[:24]
