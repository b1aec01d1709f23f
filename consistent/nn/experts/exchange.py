"""Send rows to the ranks that hold their experts, and results back, on plain tensors.

```
2 ranks, 4 experts, top 1     rank 0: experts 0, 1            rank 1: experts 2, 3
tokens: their experts         a: 1   b: 2   c: 0              d: 3   e: 0   f: 2
in the order of experts       c a | b                         e | f d
as rows arrive                c a e   of experts 0 1 0        b f d   of experts 2 2 3
and back                      c a | b                         e | f d
```

First the ranks exchange, in one small message, how many rows they send for each expert and to each
rank. Then one all-to-all sends the rows, and another one the results. Each of the two is the
backward of the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ...dispatch.running.agreed import exchange_errors
from ...forms.whole_numbers import read_ints
from ...movement.differentiable import exchange_rows
from ...spec import piece
from ...spec.tracer import callbacks

_ON_ROUTED = callbacks("on_routed")


@dataclass(frozen=True)
class Owners:
    """Assignment of experts to the ranks of one group, which holds all experts together.

    Args:
        ranks: the ranks among which the experts are divided.
        me: this rank's position in ``ranks``.
        sizes: the number of experts of each rank; experts are assigned in the order of ranks.
        told: all ranks that run the module, those of other groups too; they get this group's
            errors.
    """

    ranks: Ranks
    me: int
    sizes: tuple[int, ...]
    told: Ranks


class Routes:
    """Routing of one call: which rows this rank sends to each rank, and which it receives.

    A row is a token for one of its experts, so each token gives k rows. ``send`` brings rows to
    the ranks of their experts, and ``send_back`` returns results. Making an instance exchanges the
    numbers of rows.

    Args:
        index: [tokens, k] of whole numbers, the experts of each token. The number after the last
            expert marks a dropped choice, which adds nothing to the token.
        owners: the assignment of experts to ranks.

    Raises:
        ValueError: an index is out of range on any rank. All ranks raise it, those of other groups
            too.
    """

    def __init__(self, index: Tensor, owners: Owners) -> None:
        self.owners, self.k = owners, index.shape[-1]
        n, sizes = sum(owners.sizes), list(owners.sizes)
        flat = index.reshape(-1)
        self.rows = flat.shape[0]
        clamped_index = flat.clamp(0, n)
        counts = clamped_index.new_zeros(n + 1).scatter_add_(
            0, clamped_index, torch.ones_like(clamped_index)
        )[:n]
        received_counts = self._exchange_counts(counts, (flat != clamped_index).sum())
        own_count = sizes[owners.me]
        _check_indices([each[own_count] for each in received_counts], owners, n)
        self.expert_counts = [each[:own_count] for each in received_counts]
        # counts[i, j]: the number of rows from rank i to rank j.
        self.counts = torch.tensor([each[own_count + 1 :] for each in received_counts])
        self.dropped = clamped_index == n
        # Positions of the rows in the order of their experts. Dropped ones sort last and are cut.
        self.order = clamped_index.argsort(stable=True)[: int(self.counts[owners.me].sum())]
        for notify in _ON_ROUTED:
            notify(owners.ranks, self.counts.sum(0).tolist())

    def _exchange_counts(self, counts: Tensor, wrong: Tensor) -> list[list[int]]:
        """Exchange the row counts, and return what each rank sent to this one.

        From each rank: how many rows it sends to each expert of this rank, then how many of its
        indices are wrong, then how many rows it sends to each rank.

        Args:
            counts: [experts], this rank's rows for each expert.
            wrong: the number of this rank's indices that are out of range.
        """
        sizes, me = list(self.owners.sizes), self.owners.me
        parts = counts.split(sizes)
        of_all = torch.stack([wrong, *(part.sum() for part in parts)])
        messages = [torch.cat([part, of_all]) for part in parts]
        length = sizes[me] + 1 + len(sizes)
        incoming = current().all_to_all(messages, [(length,)] * len(sizes), self.owners.ranks)
        numbers = read_ints(torch.cat(incoming), self._balanced_counts)
        return _split_list(numbers, [length] * len(sizes))

    def _balanced_counts(self) -> list[int]:
        """Return what ``_exchange_counts`` would receive if every expert got equally many rows.

        A simulation, whose tensors have no values to count, uses them instead.
        """
        n, me, sizes = sum(self.owners.sizes), self.owners.me, list(self.owners.sizes)
        by_rank = _split_list([piece(self.rows, n, k)[1] for k in range(n)], sizes)
        return [*by_rank[me], 0, *map(sum, by_rank)] * len(sizes)

    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send the rows of ``x`` [tokens, ...] to their experts' ranks, and return what arrives.

        Returns:
            the rows that arrive from all ranks, and on the CPU for each row the index of its expert
            among the experts of this rank.
        """
        rows = x.index_select(0, self.order // self.k)
        arrived_rows = exchange_rows(rows, self.counts, self.owners.me, self.owners.ranks)
        number = torch.arange(len(self.expert_counts[0])).repeat(len(self.expert_counts))
        return arrived_rows, number.repeat_interleave(torch.tensor(self.expert_counts).flatten())

    def send_back(
        self, results: Tensor, weights: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Send results back to their tokens' ranks, and return each token's weighted sum.

        Args:
            results: this rank's results, a row for each one that arrived.
            weights: [tokens, k], the weights of each token's experts.
            dtype: products of result and weight are cast to this dtype, and added one by one. None:
                they are summed as they are, and the sum is cast to the dtype of ``results``.

        Returns:
            [tokens, ...], the sum over each token's experts of result times weight.
        """
        returned_rows = exchange_rows(results, self.counts.T, self.owners.me, self.owners.ranks)
        all_rows = returned_rows.new_zeros(self.rows, *returned_rows.shape[1:]).index_copy(
            0, self.order, returned_rows
        )
        all_rows = all_rows.unflatten(0, weights.shape)
        weights = weights.masked_fill(self.dropped.view(weights.shape), 0)  # they may be NaN
        expanded = weights.reshape(*weights.shape, *(1,) * (all_rows.ndim - weights.ndim))
        products = all_rows * expanded
        if dtype is None:
            return products.sum(1).to(results.dtype)
        # Not sum(): it would round to the dtype of the products, and add them in another order.
        return reduce(torch.add, products.to(dtype).unbind(1))


def _split_list(numbers: list[int], sizes: list[int]) -> list[list[int]]:
    """Return consecutive parts of ``numbers``: ``[1, 2, 3]``, ``[2, 1]`` -> ``[[1, 2], [3]]``."""
    rest = iter(numbers)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _check_indices(wrong: list[int], owners: Owners, n: int) -> None:
    """Raise on all ranks if a rank has indices that are no experts.

    Args:
        wrong: for each rank of the group, how many of its indices are out of range.
        owners: the assignment of experts to ranks. Ranks of its other groups raise, too.
        n: the number of experts.

    Raises:
        ValueError: a number in ``wrong`` is above 0.
    """
    try:
        for rank, number in zip(owners.ranks, wrong, strict=True):
            if number:
                raise ValueError(
                    f"experts: {number} indices on rank {rank} are none of the {n} experts. A "
                    f"router's indices are 0 to {n - 1}; {n} stands for a token that is dropped."
                )
    except ValueError as error:
        if len(owners.told) > len(owners.ranks):
            exchange_errors(error, owners.told)
        raise
    if len(owners.told) > len(owners.ranks):  # other groups wait to learn that no error occurred
        exchange_errors(None, owners.told)
