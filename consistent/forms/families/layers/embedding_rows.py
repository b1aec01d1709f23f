"""Embedding whose table rows and indices are split over the same ranks.

Each rank requests from the owners the rows that it looks up, each row once.

```
rank 0: rows 0 1 2, looks up 4 1 4       asks 1: 4        gets row 4
rank 1: rows 3 4 5, looks up 0 5 1       asks 0: 0 1      gets rows 0, 1
```

There are three messages: how many rows are requested, which rows, and the rows themselves. In
backward each rank adds up the gradients of its look-ups per row, and sends the sums with the row
numbers to the owners. An owner adds them into zeros or, with ``sparse=True``, makes them the
entries of a sparse gradient. In a recorded step forward and backward are one op each, since the
sizes of their messages depend on values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ....spec import piece
from ...join_results import index_and_count
from ...refused import require_in_range
from ...registry import Shards, form
from ...whole_numbers import has_values


@form("rows_of_owners", raises_first=True)
def rows_of_owners(shard: Shards) -> Tensor:
    """Run torch.embedding where other ranks own some of the rows: fetch them, then look up."""
    table, index = shard.tensors
    if shard.coordinate is None:
        return shard.run(*shard.args, **shard.kwargs)
    require_in_range(index, shard.specs[0].shape[0], shard.call.name)
    edges = tuple(itertools.accumulate((sizes[0] for _, sizes in shard.regions()), initial=0))
    owners = RowOwners(edges, index_and_count(shard)[0], shard.ranks)
    add_up = _AddUp(owners, shard.get("padding_idx", -1), shard.get("sparse", False))
    return _LookUp.apply(table, index, add_up)


@dataclass(frozen=True)
class RowOwners:
    """Which rank owns which table rows, and the messages by which ranks exchange rows.

    Args:
        edges: the k-th rank owns the rows from edges[k] to edges[k + 1].
        me: index of this rank among the owners.
        ranks: world ranks of all owners.
    """

    edges: tuple[int, ...]
    me: int
    ranks: Ranks

    def unique(self, index: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Find the distinct rows in ``index``, so that each is requested once.

        Returns:
            (the rows, each once and in order; the position of each index among them; the number of
            them that each rank owns).
        """
        if has_values(index):
            rows, places = index.unique(return_inverse=True)
            return rows, places, self.counts(rows)
        # A simulation assumes different indices, and that each rank owns the same number of them.
        count = min(index.numel(), self.edges[-1])
        places = torch.zeros_like(index)
        return index.new_empty(count), places, [piece(count, len(self.ranks), k)[1] for k in
                                                range(len(self.ranks))]  # fmt: skip

    def counts(self, rows: Tensor) -> list[int]:
        """Return how many of the sorted ``rows`` each rank owns.

        With ``edges`` (0, 3, 6): ``[1, 4, 5] -> [1, 2]``.
        """
        boundaries = torch.searchsorted(rows, torch.tensor(self.edges, device=rows.device)).tolist()
        return [b - a for a, b in itertools.pairwise(boundaries)]

    def request_rows(self, rows: Tensor, send_counts: list[int]) -> tuple[Tensor, list[int]]:
        """Request ``rows`` from their owners: ``send_counts[k]`` of them from the k-th rank.

        Returns:
            (the rows that all ranks request from this rank, as indices into its shard; the number
            that each rank requests).
        """
        counts = [rows.new_full((1,), n) for n in send_counts]
        received_counts = torch.cat(current().all_to_all(counts, [(1,)] * len(counts), self.ranks))
        receive_counts = (
            received_counts.tolist()
            if has_values(received_counts)
            else [send_counts[self.me]] * len(send_counts)
        )
        requested_rows = self.exchange_rows(rows, send_counts, receive_counts)
        return requested_rows - self.edges[self.me], receive_counts

    def exchange_rows(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows by an all-to-all.

        This rank sends the next ``send_counts[k]`` rows of ``x`` to the k-th rank, and receives
        ``receive_counts[k]`` rows from it.
        """
        pieces = [part.contiguous() for part in x.split(send_counts)]
        shapes = [(n, *x.shape[1:]) for n in receive_counts]
        return torch.cat(current().all_to_all(pieces, shapes, self.ranks))


@dataclass(frozen=True)
class _Fetch:
    """Fetch the table rows at some indices from the ranks that own them.

    Maps [this rank's shard of the table, indices] to [the rows]. In a recorded step it is one op.
    """

    owners: RowOwners

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        table, index = xs
        rows, places, send_counts = self.owners.unique(index)
        requested_rows, receive_counts = self.owners.request_rows(rows, send_counts)
        received_rows = self.owners.exchange_rows(
            table.index_select(0, requested_rows), receive_counts, send_counts
        )
        return [
            received_rows.index_select(0, places.reshape(-1)).reshape(*index.shape, table.shape[1])
        ]


@dataclass(frozen=True)
class _AddUp:
    """Compute the gradient of this rank's shard of the table from the gradients of all look-ups.

    Maps [gradients of looked-up rows, indices] to [the gradient]. Row ``padding`` of the table gets
    no gradient. With ``sparse`` the gradient is a sparse tensor.
    """

    owners: RowOwners
    padding: int
    sparse: bool

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        grad, index = xs
        rows, places, send_counts = self.owners.unique(index)
        flat = grad.reshape(-1, grad.shape[-1])
        row_grads = flat.new_zeros(len(rows), grad.shape[-1]).index_add_(
            0, places.reshape(-1), flat
        )
        if not self.sparse:
            row_grads = row_grads.masked_fill_((rows == self.padding).unsqueeze(1), 0)
        elif self.padding >= 0:
            is_kept = rows != self.padding
            rows, row_grads = rows[is_kept], row_grads[is_kept]
            send_counts = self.owners.counts(rows)
        requested_rows, receive_counts = self.owners.request_rows(rows, send_counts)
        first, last = self.owners.edges[self.owners.me : self.owners.me + 2]
        shape = (last - first, grad.shape[-1])
        received_grads = self.owners.exchange_rows(row_grads, send_counts, receive_counts)
        if self.sparse:
            entry_index = requested_rows.unsqueeze(0)
            return [
                torch.sparse_coo_tensor(entry_index, received_grads, shape, check_invariants=False)
            ]
        return [grad.new_zeros(shape).index_add_(0, requested_rows, received_grads)]

    def run(self, grad: Tensor, index: Tensor) -> Tensor:
        """Compute the gradient of the shard, in a recorded step as one op.

        A sparse gradient is not one op, because its number of entries depends on values.
        """
        xs = [grad, index]
        if self.sparse:  # the number of entries depends on values, so it cannot be one recorded op
            return self(xs)[0]
        return current().as_one(self, xs, self.owners.ranks)[0]


class _LookUp(torch.autograd.Function):
    """Look up rows in a table whose rows are split over ranks.

    ```
    forward    row i of the result     <-  row index[i] of the table, on any rank
    backward   row index[i] of the gradient, on any rank  +=  row i
    ```
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, add_up: _AddUp) -> Tensor:
        ctx.save_for_backward(index)
        ctx.add_up = add_up
        owners = add_up.owners
        return current().as_one(_Fetch(owners), [table.detach(), index], owners.ranks)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _SumRowGrads.apply(grad, index, ctx.add_up), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (index,) = ctx.saved_tensors
        return _LookUp.apply(tangent, index, ctx.add_up)


class _SumRowGrads(torch.autograd.Function):
    """The backward pass of ``_LookUp`` as an autograd function, for second derivatives.

    Its own backward looks up rows of the incoming gradient, with zeros for padding.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, index: Tensor, add_up: _AddUp) -> Tensor:
        ctx.save_for_backward(index)
        ctx.add_up = add_up
        return add_up.run(grad.detach(), index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,), add_up = ctx.saved_tensors, ctx.add_up
        rows = _LookUp.apply(grad, index, replace(add_up, padding=-1))
        return rows.masked_fill((index == add_up.padding).unsqueeze(-1), 0), None, None
