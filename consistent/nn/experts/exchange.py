"""Rows that go to the ranks which have their experts, and come back: on plain tensors.

```
2 ranks, 4 experts, top 1     rank 0: experts 0, 1            rank 1: experts 2, 3
tokens: their experts         a: 1   b: 2   c: 0              d: 3   e: 0   f: 2
in the order of experts       c a | b                         e | f d
there                         c a e   of experts 0 1 0        b f d   of experts 2 2 3
and back                      c a | b                         e | f d
```

The ranks first tell each other how many rows of each expert come, and how many they send to each
rank, in one small message; then the rows are one all-to-all, and so is the way back. The gradient
of each is the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ...dispatch.running.agreed import tell
from ...forms.whole_numbers import whole_numbers
from ...movement.differentiable import swap
from ...spec import piece
from ...spec.tracer import callbacks

_ON_ROUTED = callbacks("on_routed")


@dataclass(frozen=True)
class Owners:
    """Who has which experts.

    Args:
        ranks: those among which the experts are divided.
        me: this rank's place among them.
        sizes: how many experts each has; they lie in this order.
        told: all ranks that run the module, some of them in other groups.
    """

    ranks: Ranks
    me: int
    sizes: tuple[int, ...]
    told: Ranks


class Routes:
    """Where the rows of this rank go, and what comes to it.

    Args:
        index: [tokens, k] of whole numbers, the experts of each token. The number behind the last
            one says that a token is dropped there, which adds nothing.
        owners: who has them.

    Raises:
        ValueError: an index is none of the experts, on any of the ranks; all of them raise it.
            So do those of other groups.
    """

    def __init__(self, index: Tensor, owners: Owners) -> None:
        self.owners, self.k = owners, index.shape[-1]
        n, sizes = sum(owners.sizes), list(owners.sizes)
        flat = index.reshape(-1)
        self.rows = flat.shape[0]
        known = flat.clamp(0, n)
        counts = known.new_zeros(n + 1).scatter_add_(0, known, torch.ones_like(known))[:n]
        told = self._told(counts, (flat != known).sum())
        here = sizes[owners.me]
        _check([each[here] for each in told], owners, n)
        self.coming = [each[:here] for each in told]
        # From each rank to each.
        self.counts = torch.tensor([each[here + 1 :] for each in told])
        # Rows in the order of their experts; those that are dropped come last, and are left out.
        self.order = known.argsort(stable=True)[: int(self.counts[owners.me].sum())]
        for notify in _ON_ROUTED:
            notify(owners.ranks, self.counts.sum(0).tolist())

    def _told(self, counts: Tensor, wrong: Tensor) -> list[list[int]]:
        """What each rank tells this one: how many rows come from it to each expert that is here,
        how many of its indices are wrong, and how many rows it sends to each rank."""
        sizes, me = list(self.owners.sizes), self.owners.me
        parts = counts.split(sizes)
        of_all = torch.stack([wrong, *(part.sum() for part in parts)])
        told = [torch.cat([part, of_all]) for part in parts]
        length = sizes[me] + 1 + len(sizes)
        come = current().all_to_all(told, [(length,)] * len(sizes), self.owners.ranks)
        numbers = whole_numbers(torch.cat(come), self._balanced)
        return _cut(numbers, [length] * len(sizes))

    def _balanced(self) -> list[int]:
        """In a simulation each expert gets as many rows of each rank."""
        n, me, sizes = sum(self.owners.sizes), self.owners.me, list(self.owners.sizes)
        by_rank = _cut([piece(self.rows, n, k)[1] for k in range(n)], sizes)
        return [*by_rank[me], 0, *map(sum, by_rank)] * len(sizes)

    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows that come of all ranks' ``x`` [tokens, ...], the place of each one's expert
        among those that are here)."""
        rows = x.index_select(0, self.order // self.k)
        arrived = swap(rows, self.counts, self.owners.me, self.owners.ranks)
        number = torch.arange(len(self.coming[0])).repeat(len(self.coming))
        expert = number.repeat_interleave(torch.tensor(self.coming).flatten())
        return arrived, expert.to(x.device)

    def give_back(self, made: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts of what they made of it, [tokens, ...], times its
        ``weights`` [tokens, k]."""
        back = swap(made, self.counts.T, self.owners.me, self.owners.ranks)
        every = back.new_zeros(self.rows, *back.shape[1:]).index_copy(0, self.order, back)
        every = every.unflatten(0, weights.shape)
        wide = weights.reshape(*weights.shape, *(1,) * (every.ndim - weights.ndim))
        return (every * wide).sum(1).to(made.dtype)


def _cut(numbers: list[int], sizes: list[int]) -> list[list[int]]:
    left = iter(numbers)
    return [list(itertools.islice(left, size)) for size in sizes]


def _check(wrong: list[int], owners: Owners, n: int) -> None:
    try:
        for rank, number in zip(owners.ranks, wrong, strict=True):
            if number:
                raise ValueError(
                    f"experts: {number} indices on rank {rank} are none of the {n} experts. A "
                    f"router's indices are 0 to {n - 1}; {n} stands for a token that is dropped."
                )
    except ValueError as error:
        if len(owners.told) > len(owners.ranks):
            tell(error, owners.told)
        raise
    if len(owners.told) > len(owners.ranks):  # other groups do not know of each other
        tell(None, owners.told)
