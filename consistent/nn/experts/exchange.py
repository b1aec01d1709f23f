"""Rows that go to the ranks which have their experts, and come back: on plain tensors.

```
2 ranks, 4 experts, top 1     rank 0: experts 0, 1            rank 1: experts 2, 3
tokens: their experts         a: 1   b: 2   c: 0              d: 3   e: 0   f: 2
in the order of experts       c a | b                         e | f d
there                         c a e   of experts 0 1 0        b f d   of experts 2 2 3
and back                      c a | b                         e | f d
```

The ranks first tell each other how many rows of each expert come, in one small message; then the
rows are one all-to-all, and so is the way back. The gradient of each is the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current
from mirrored.transports.failures import raised_together

from ...forms.whole_numbers import whole_numbers
from ...movement.differentiable import swap


@dataclass(frozen=True)
class Owners:
    """Who has which experts.

    Args:
        ranks: those among which the experts are divided.
        me: this rank's place among them.
        sizes: how many experts each has; they lie in this order.
    """

    ranks: Ranks
    me: int
    sizes: tuple[int, ...]


class Routes:
    """Where the rows of this rank go, and what comes to it.

    Args:
        index: [tokens, k] of whole numbers, the experts of each token. The number behind the last
            one says that a token is dropped there, which adds nothing.
        owners: who has them.

    Raises:
        ValueError: an index is none of the experts, on any of the ranks; all of them raise it.
    """

    def __init__(self, index: Tensor, owners: Owners) -> None:
        self.owners, self.k = owners, index.shape[-1]
        n, me, sizes = sum(owners.sizes), owners.me, owners.sizes
        flat = index.reshape(-1)
        self.rows = flat.shape[0]
        known = flat.clamp(0, n)
        counts = torch.bincount(known, minlength=n + 1)[:n].split(list(sizes))
        wrong = (flat != known).sum().reshape(1)
        going = torch.stack([part.sum() for part in counts])
        told = [torch.cat([part, wrong]) for part in counts]
        shapes = [(sizes[me] + 1,)] * len(sizes)
        coming = torch.stack(current().all_to_all(told, shapes, owners.ranks))
        _check(coming[:, -1], owners, n)
        self.each = coming[:, :-1]  # rows from each rank, of each expert that is here
        self.counts = _square(going, self.each.sum(1), me)
        sent = whole_numbers(going, lambda: _balanced(self.rows, len(sizes)))
        # Rows in the order of their experts; those that are dropped come last, and are left out.
        self.order = known.argsort(stable=True)[: sum(sent)]

    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows that come of all ranks' ``x`` [tokens, ...], the place of each one's expert
        among those that are here)."""
        rows = x.index_select(0, self.order // self.k)
        arrived = swap(rows, self.counts, self.owners.me, self.owners.ranks)
        numbers = torch.arange(self.each.shape[1], device=x.device).repeat(self.each.shape[0])
        return arrived, numbers.repeat_interleave(self.each.reshape(-1))

    def give_back(self, made: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts of what they made of it, [tokens, ...], times its
        ``weights`` [tokens, k]."""
        back = swap(made, self.counts.T, self.owners.me, self.owners.ranks)
        every = back.new_zeros(self.rows, *back.shape[1:]).index_copy(0, self.order, back)
        every = every.unflatten(0, weights.shape)
        wide = weights.reshape(*weights.shape, *(1,) * (every.ndim - weights.ndim))
        return (every * wide).sum(1).to(made.dtype)


def _square(going: Tensor, coming: Tensor, me: int) -> Tensor:
    """Rows from each rank to each, as far as they concern this one."""
    counts = going.new_zeros(len(going), len(going))
    counts[me], counts[:, me] = going, coming
    return counts


def _balanced(rows: int, parts: int) -> list[int]:
    """In a simulation as many rows go to each rank."""
    return [(k + 1) * rows // parts - k * rows // parts for k in range(parts)]


def _check(wrong: Tensor, owners: Owners, n: int) -> None:
    found = whole_numbers(wrong, lambda: [0] * len(owners.ranks))
    for rank, number in zip(owners.ranks, found, strict=True):
        if number:
            raise ValueError(
                raised_together(
                    f"experts: {number} indices on rank {rank} are none of the {n} experts. A "
                    f"router's indices are 0 to {n - 1}; {n} stands for a token that is dropped."
                )
            )
