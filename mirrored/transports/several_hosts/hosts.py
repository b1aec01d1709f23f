"""Which ranks of a group are on which host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...comm import Ranks


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group's ranks, numbered in the order in which they first come.

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
        """The hosts of `ranks`, which are called `names`."""
        numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return cls(ranks, tuple(numbers[name] for name in names), ranks.index(rank))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The positions of each host's ranks."""
        return members(self.of)

    @property
    def host(self) -> int:
        """The host of this rank."""
        return self.of[self.me]

    @property
    def mine(self) -> tuple[int, ...]:
        """The positions of the ranks on this rank's host."""
        return self.members[self.host]

    @cached_property
    def peers(self) -> Ranks:
        """The ranks on this rank's host."""
        return tuple(self.ranks[k] for k in self.mine)

    @cached_property
    def most(self) -> int:
        """The ranks on the host that has most."""
        return max(map(len, self.members))

    def heads(self, source: int | None = None) -> Ranks:
        """One rank of each host: the first; on the host of position `source` that one."""
        first = [own[0] for own in self.members]
        if source is not None:
            first[self.of[source]] = source
        return tuple(self.ranks[k] for k in first)

    def partner(self, position: int, host: int) -> int:
        """The position on `host` that a rank at `position` sends to: the ranks of a host share what
        comes from another one as evenly as can be."""
        return partner(self.of, position, host)


def members(of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The positions on each host."""
    return tuple(tuple(k for k, own in enumerate(of) if own == host) for host in range(max(of) + 1))


@lru_cache(1 << 14)
def partner(of: tuple[int, ...], position: int, host: int) -> int:
    """See `Hosts.partner`."""
    there = [k for k, own in enumerate(of) if own == host]
    at = sum(own == of[position] for own in of[:position])
    return there[at % len(there)]
