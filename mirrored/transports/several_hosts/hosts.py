"""Maps the ranks of a group to their hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...comm import Ranks


@dataclass(frozen=True)
class Hosts:
    """Which ranks of a group are on which host; hosts are numbered by first appearance.

    A position is an index into ``ranks``. With ``ranks=(4, 5, 6)`` and ``of=(0, 0, 1)``, ranks 4
    and 5 are on host 0, and rank 6, at position 2, is on host 1.

    Args:
        ranks: the group.
        of: the host of each rank.
        me: the position of this rank in the group.
    """

    ranks: Ranks
    of: tuple[int, ...]
    me: int

    @classmethod
    def told(cls, ranks: Ranks, names: Sequence[Hashable], rank: int) -> Hosts:
        """Make the hosts of ``ranks`` from ``names``, the name of each rank's host.

        ``rank`` is this process's world rank.
        """
        numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return cls(ranks, tuple(numbers[name] for name in names), ranks.index(rank))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the ranks of each host: ``((0, 1), (2,))`` if ``of`` is ``(0, 0, 1)``."""
        return members(self.of)

    @property
    def host(self) -> int:
        """Number of this rank's host."""
        return self.of[self.me]

    @property
    def mine(self) -> tuple[int, ...]:
        """Positions of the ranks on this rank's host, this rank included."""
        return self.members[self.host]

    @cached_property
    def peers(self) -> Ranks:
        """World ranks on this rank's host, this rank included."""
        return tuple(self.ranks[k] for k in self.mine)

    @cached_property
    def most(self) -> int:
        """Number of ranks on the host that has the most."""
        return max(map(len, self.members))

    def heads(self, source: int | None = None) -> Ranks:
        """Return one world rank of each host, which exchanges messages for its host.

        It is the host's first rank. In a broadcast from the rank at position ``source``, it is that
        rank on its host.
        """
        first = [own[0] for own in self.members]
        if source is not None:
            first[self.of[source]] = source
        return tuple(self.ranks[k] for k in first)

    def partner(self, position: int, host: int) -> int:
        """Return the position on ``host`` that exchanges messages with the rank at ``position``.

        The k-th rank of one host exchanges with the k-th of the other, modulo the number of ranks
        there, so that the ranks of a host share the messages evenly.
        """
        return partner(self.of, position, host)


def members(of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the ranks of each host, where ``of`` is the host of each rank.

    ``members((0, 0, 1)) -> ((0, 1), (2,))``.
    """
    return tuple(tuple(k for k, own in enumerate(of) if own == host) for host in range(max(of) + 1))


@lru_cache(1 << 14)
def partner(of: tuple[int, ...], position: int, host: int) -> int:
    """Implement ``Hosts.partner``, where ``of`` is the host of each rank."""
    there = [k for k, own in enumerate(of) if own == host]
    at = sum(own == of[position] for own in of[:position])
    return there[at % len(there)]
