"""Cost model of messages between ranks, in seconds.

```
host 0   rank 0 - 1 - 2 - 3     inside: each rank sends at the rate of its own link
           |    |   |   |       between: each rank has a share of its host's links
host 1   rank 4 - 5 - 6 - 7
```

* Collectives in a ring (all-reduce, all-gather, broadcast) pass every byte through every rank, as
  NCCL's rings do: a ring is as fast as its slowest hop. A group with g ranks on each host runs g
  rings at a time, and each ring leaves the host by another rank's link, as NCCL does with one
  network card for each GPU. So bytes between hosts move at g times the rate of one rank's link, and
  at no more than the rate inside. Groups that are used at the same time, one for each GPU of a host
  for example, have a link each.
* A ring of n ranks makes n - 1 hops, and an all-reduce twice as many. For an all-reduce NCCL also
  has trees, with about twice the logarithm of n hops at the full rate: the variant with fewer
  seconds of hops counts.
* Between pairs of ranks (all-to-all, exchange, send), bytes to ranks of other hosts leave by this
  rank's own link, while the rest stays inside. A reduce-scatter counts as the all-to-all of its
  parts, which is how the library implements it.

Sources: NCCL's documentation (environment variables NCCL_ALGO, NCCL_CROSS_NIC) and "Massively Scale
Your Deep Learning Training with NCCL 2.4" on NVIDIA's developer blog for the trees; nccl-tests'
doc/PERFORMANCE.md for the bytes that a ring sends.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

Ranks = tuple[int, ...]

RING_COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "gather_objects")
PAIRWISE_MESSAGES = ("all_to_all", "exchange", "send")


@dataclass(frozen=True)
class Wire:
    """Network link of one rank: seconds for each hop, and bytes that the rank sends in a second."""

    latency_s: float
    bytes_per_s: float


class Network(Protocol):
    """Protocol of the network parameters that the formulas below read; ``CostModel`` has them."""

    @property
    def ranks_per_host(self) -> int: ...
    @property
    def inside(self) -> Wire: ...
    @property
    def between(self) -> Wire: ...
    @property
    def message_start_s(self) -> float: ...


def seconds(network: Network, name: str, nbytes: int, ranks: Ranks) -> float:
    """Return the seconds of one communication in which the busiest rank sends ``nbytes``.

    Args:
        network: the network.
        name: kind of communication, one of ``RING_COLLECTIVES`` and ``PAIRWISE_MESSAGES``.
        nbytes: bytes that the busiest rank sends.
        ranks: ranks of the world that take part; fewer than two take no time.

    Raises:
        ValueError: no communication has the name ``name``.
    """
    if name not in RING_COLLECTIVES and name not in PAIRWISE_MESSAGES:
        raise ValueError(
            f"message_seconds: there is no communication {name!r}; there are "
            f"{', '.join((*RING_COLLECTIVES, *PAIRWISE_MESSAGES))}."
        )
    if len(ranks) < 2:
        return 0.0
    hosts, fewest_ranks = _count_hosts(ranks, network.ranks_per_host)
    formula = _pairs_seconds if name in PAIRWISE_MESSAGES else _ring_seconds
    return network.message_start_s + formula(network, name, nbytes, len(ranks), hosts, fewest_ranks)


def links(network: Network, ranks: Ranks) -> tuple[str, ...]:
    """Return the links that a message between these ranks takes.

    ``("inside",)`` if all are on one host, ``("between",)`` if each is on its own, else both.
    """
    hosts, _ = _count_hosts(ranks, network.ranks_per_host)
    if hosts == 1:
        return ("inside",)
    return ("between",) if hosts == len(ranks) else ("inside", "between")


@lru_cache(4096)
def _count_hosts(ranks: Ranks, ranks_per_host: int) -> tuple[int, int]:
    """Return (number of hosts that have some of ``ranks``, fewest of ``ranks`` on one of them)."""
    counts = Counter(rank // ranks_per_host for rank in ranks)
    return len(counts), min(counts.values())


def _ring_seconds(
    network: Network, name: str, nbytes: int, n: int, hosts: int, fewest_ranks: int
) -> float:
    """Return the seconds of a collective that passes every byte through all ranks.

    Of its ``n`` ranks, on ``hosts`` hosts, at least ``fewest_ranks`` are on each host. The time to
    start the message is not included.
    """
    if name == "broadcast":  # ``nbytes`` counts each receiver, but a ring sends every byte once
        nbytes //= n - 1
    rate = network.inside.bytes_per_s if fewest_ranks > 1 or hosts == 1 else math.inf
    if hosts > 1:
        # Every ring passes through every host, and the smallest group has the fewest links.
        rate = min(rate, fewest_ranks * network.between.bytes_per_s)
    return nbytes / rate + _hop_seconds(network, name, n, hosts, fewest_ranks)


def _hop_seconds(network: Network, name: str, n: int, hosts: int, fewest_ranks: int) -> float:
    """Return the seconds of a collective's hops: a ring, or a tree if that is faster.

    Only an all-reduce has a tree. The arguments are those of ``_ring_seconds``.
    """
    inside, between = network.inside.latency_s, network.between.latency_s
    crossing = hosts if hosts > 1 else 0
    ring = (n - 1 - max(crossing - 1, 0)) * inside + max(crossing - 1, 0) * between
    if name != "all_reduce":
        return ring
    local_hops = math.ceil(n / hosts) - 1  # a chain inside a host, a tree between hosts
    tree = local_hops * inside + math.ceil(math.log2(hosts)) * between
    return 2 * min(ring, tree)


def _pairs_seconds(
    network: Network, name: str, nbytes: int, n: int, hosts: int, fewest_ranks: int
) -> float:
    """Return the seconds of a communication in which ranks send directly to each other.

    Bytes for the own host and for other hosts travel at the same time, so the slower of both
    counts.
    """
    if hosts == 1:
        return network.inside.latency_s + nbytes / network.inside.bytes_per_s
    # A rank of the smallest group sends the largest share to other hosts.
    remote_share = (n - fewest_ranks) / (n - 1)
    inside = network.inside.latency_s + (1 - remote_share) * nbytes / network.inside.bytes_per_s
    return max(
        inside, network.between.latency_s + remote_share * nbytes / network.between.bytes_per_s
    )
