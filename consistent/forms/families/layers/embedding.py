"""Embedding with the vocabulary split over ranks.

Each rank looks up the rows that it holds and returns zeros for the others, so that the result is P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...native import load as native
from ...refused import require_in_range
from ...registry import Shards, form


@form("masked_embedding")
def masked_embedding(shard: Shards) -> Tensor:
    """Run torch.embedding on the table rows that this rank holds, with zeros for all others.

    Forward and backward are one pass each.
    """
    table, index = shard.tensors
    # Check first: the mask would hide indices that torch rejects.
    require_in_range(index, shard.specs[0].shape[0], shard.call.name)
    return _LookUp.apply(
        table,
        index,
        shard.region()[0][0],
        shard.get("padding_idx", -1),
        shard.get("scale_grad_by_freq", False),
    )


class _LookUp(torch.autograd.Function):
    """Look up rows in this rank's part of a table, with zeros for the rows of other ranks.

    ```
    forward    row i of the result     <-  row index[i] of the table, if it is held here
    backward   row index[i] of the gradient  +=  row i
    ```
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, index: Tensor, start: int, padding_idx: int, by_count: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.where = table.shape[0], start, padding_idx, by_count
        return native.masked_embedding(table, index, start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (index,) = ctx.saved_tensors
        return _AddUpGrads.apply(grad, index, *ctx.where), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (index,) = ctx.saved_tensors
        return native.masked_embedding(tangent, index, ctx.where[1])


class _AddUpGrads(torch.autograd.Function):
    """The backward pass of ``_LookUp`` as an autograd function, for second derivatives.

    Its own backward looks up rows of the incoming gradient, with zeros for padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        index: Tensor,
        rows: int,
        start: int,
        padding_idx: int,
        by_count: bool,
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.where = start, padding_idx, by_count
        return native.masked_embedding_backward(grad, index, rows, start, padding_idx, by_count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,), (start, padding_idx, by_count) = ctx.saved_tensors, ctx.where
        if by_count:
            raise RuntimeError(
                "embedding: scale_grad_by_freq=True and a second derivative were asked for.\n"
                "  torch does not define the derivative of a gradient that is divided by counts.\n"
                "  Leave scale_grad_by_freq out, or differentiate once."
            )
        rows = _LookUp.apply(grad, index.masked_fill(index == padding_idx, -1), start, -1, False)
        return rows, None, None, None, None, None
