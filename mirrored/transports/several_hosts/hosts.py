"""Maps the ranks of a group to their hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...comm import Ranks


@dataclass(frozen=True)
class Hosts:
    """Which ranks of a group are on which host; hosts are numbered by first appearance.

    A position is an index into ``ranks``. With ``ranks=(4, 5, 6)`` and ``host_of=(0, 0, 1)``, ranks
    4 and 5 are on host 0, and rank 6, at position 2, is on host 1.

    Args:
        ranks: the group.
        host_of: the host of each rank.
        position: the position of this rank in the group.
    """

    ranks: Ranks
    host_of: tuple[int, ...]
    position: int

    @classmethod
    def from_names(cls, ranks: Ranks, names: Sequence[Hashable], rank: int) -> Hosts:
        """Make the hosts of ``ranks`` from ``names``, the name of each rank's host.

        ``rank`` is this process's world rank.
        """
        numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return cls(ranks, tuple(numbers[name] for name in names), ranks.index(rank))

    @cached_property
    def positions_by_host(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each host's ranks: ``((0, 1), (2,))`` if ``host_of`` is ``(0, 0, 1)``."""
        return positions_by_host(self.host_of)

    @property
    def host(self) -> int:
        """Number of this rank's host."""
        return self.host_of[self.position]

    @property
    def own_positions(self) -> tuple[int, ...]:
        """Positions of the ranks on this rank's host, this rank included."""
        return self.positions_by_host[self.host]

    @cached_property
    def peers(self) -> Ranks:
        """World ranks on this rank's host, this rank included."""
        return tuple(self.ranks[k] for k in self.own_positions)

    @cached_property
    def max_ranks_per_host(self) -> int:
        """Number of ranks on the host that has the most."""
        return max(map(len, self.positions_by_host))

    def heads(self, source: int | None = None) -> Ranks:
        """Return one world rank of each host, which exchanges messages for its host.

        It is the host's first rank. In a broadcast from the rank at position ``source``, it is that
        rank on its host.
        """
        head_positions = [own[0] for own in self.positions_by_host]
        if source is not None:
            head_positions[self.host_of[source]] = source
        return tuple(self.ranks[k] for k in head_positions)

    def partner(self, position: int, host: int) -> int:
        """Return the position on ``host`` that exchanges messages with the rank at ``position``.

        The k-th rank of one host exchanges with the k-th of the other, modulo the number of ranks
        there, so that the ranks of a host share the messages evenly.
        """
        return partner(self.host_of, position, host)


def positions_by_host(host_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the ranks of each host, where ``host_of`` is the host of each rank.

    ``positions_by_host((0, 0, 1)) -> ((0, 1), (2,))``.
    """
    return tuple(
        tuple(k for k, own in enumerate(host_of) if own == host) for host in range(max(host_of) + 1)
    )


@lru_cache(1 << 14)
def partner(host_of: tuple[int, ...], position: int, host: int) -> int:
    """Implement ``Hosts.partner``, where ``host_of`` is the host of each rank."""
    candidates = [k for k, own in enumerate(host_of) if own == host]
    index = sum(own == host_of[position] for own in host_of[:position])
    return candidates[index % len(candidates)]
