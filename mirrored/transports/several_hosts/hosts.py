"""Maps the ranks of a group to their hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...comm import Ranks


@dataclass(frozen=True)
class Hosts:
    """Hosts of a group's ranks, numbered by first appearance.

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
        """Make the hosts of ``ranks`` from the name of each rank's host."""
        numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return cls(ranks, tuple(numbers[name] for name in names), ranks.index(rank))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each host's ranks."""
        return members(self.of)

    @property
    def host(self) -> int:
        """Host of this rank."""
        return self.of[self.me]

    @property
    def mine(self) -> tuple[int, ...]:
        """Positions of the ranks on this rank's host."""
        return self.members[self.host]

    @cached_property
    def peers(self) -> Ranks:
        """Ranks on this rank's host."""
        return tuple(self.ranks[k] for k in self.mine)

    @cached_property
    def most(self) -> int:
        """Number of ranks on the host that has most."""
        return max(map(len, self.members))

    def heads(self, source: int | None = None) -> Ranks:
        """Return one rank of each host: its first rank.

        On the host of position ``source`` it is the rank at that position instead.
        """
        first = [own[0] for own in self.members]
        if source is not None:
            first[self.of[source]] = source
        return tuple(self.ranks[k] for k in first)

    def partner(self, position: int, host: int) -> int:
        """Return the position on ``host`` that the rank at ``position`` sends to.

        The ranks of a host share the messages from another host as evenly as possible.
        """
        return partner(self.of, position, host)


def members(of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each host's ranks."""
    return tuple(tuple(k for k, own in enumerate(of) if own == host) for host in range(max(of) + 1))


@lru_cache(1 << 14)
def partner(of: tuple[int, ...], position: int, host: int) -> int:
    """Return ``Hosts.partner`` for the host ``of`` each rank."""
    there = [k for k, own in enumerate(of) if own == host]
    at = sum(own == of[position] for own in of[:position])
    return there[at % len(there)]
