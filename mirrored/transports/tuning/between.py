"""What messages cost between ranks that share no memory, measured once and kept.

The ranks of a world measure it when they first meet, in a tenth of a second, and all take the
slowest rank's figures. Each host keeps them, and the names of the hosts between which they were
measured; between others they are measured again. What is measured while other programs keep a host
busy serves these ranks, and is not kept: links between hosts differ too much for a built-in figure.
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

# A single call, the best of so many: a message waits for a processor where others have it, which
# says nothing of the link, and the mean of several would count it.
TRIES = 30


def kept_or_measured(way: Transport, ranks: Ranks, host: str) -> Link:
    """What messages between `ranks` cost, by the first one's table or a new one. A collective.

    Args:
        way: what sends the messages.
        host: the name of this rank's host, which begins with that of its machine.
    """
    mine = table.kept(len(ranks), table.MESSAGES)
    told = way.gather_objects((mine, host), ranks)
    names = [name for _, name in told]
    found, is_disturbed = told[0][0], False
    if found is None or found.hosts not in ("", _short(names)):
        found, is_disturbed = _measured(way, ranks, names)
    if found != mine and not is_disturbed:
        table.save(found, len(ranks), table.MESSAGES)
    return found.link


def measured_by_hand(way: Transport, ranks: Ranks, host: str) -> Table:
    """A new table, which is kept even if other programs disturbed it. A collective."""
    found, is_disturbed = _measured(way, ranks, way.gather_objects(host, ranks))
    if is_disturbed and way.rank == ranks[0]:
        warn_of_others("table of messages", "price them wrongly")
    table.save(found, len(ranks), table.MESSAGES)
    return found


def _measured(way: Transport, ranks: Ranks, names: Sequence[str]) -> tuple[Table, bool]:
    """A new table, and whether other programs disturbed it; the same on all ranks, whose hosts have
    these `names`. A collective."""
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
        spent.setdefault(name.split()[0], []).append(usages)
    return found, any(
        others_disturb(each[0], [rank.process for rank in each]) for each in spent.values()
    )


def _short(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(list(names)).encode()).hexdigest()[:24]
