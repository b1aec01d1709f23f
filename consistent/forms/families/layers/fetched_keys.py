"""Gather of keys and values that fetches only the ranges this rank's rows need. Differentiable.

```
forward     k0 | k1 | k2  ------>  what each rank wants of each shard  one exchange
backward    gradients of the same ranges go back, and each owner adds up what it gets
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current

from ....spec import Runs, item_count
from .ring import Group


@dataclass(frozen=True)
class KeyRanges:
    """The ranges of keys that the ranks of a group fetch from each other.

    ``runs[rank][source]`` are the (start, size) ranges of the shard of ``source`` that ``rank``
    needs; both are indices in the group.
    """

    group: Group
    runs: tuple[tuple[Runs, ...], ...]

    @property
    def others(self) -> list[int]:
        """Indices of the other ranks in the group."""
        return [k for k in range(len(self.group.ranks)) if k != self.group.me]


def fetch_keys(x: Tensor, wanted: KeyRanges) -> Tensor:
    """Fetch the rows of dim -2 that ``wanted`` lists for this rank; differentiable.

    They are in the order of the ranks that hold them, with this rank's own among them. ``x`` is
    this rank's shard.
    """
    return _FetchKeys.apply(x, wanted)


class _FetchKeys(torch.autograd.Function):
    """Autograd Function of ``fetch_keys``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: KeyRanges) -> Tensor:
        ctx.wanted, ctx.rows = wanted, x.shape[-2]
        me = wanted.group.me
        parts = [_rows_in_runs(x, wanted.runs[k][me]) for k in range(len(wanted.group.ranks))]
        sizes = [item_count(wanted.runs[me][k]) for k in range(len(wanted.group.ranks))]
        return torch.cat(_exchange_parts(wanted, parts, sizes), -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReturnGrads.apply(grad, ctx.wanted, ctx.rows), None


class _ReturnGrads(torch.autograd.Function):
    """Autograd Function of the backward of ``_FetchKeys``."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, wanted: KeyRanges, rows: int) -> Tensor:
        ctx.wanted = wanted
        me = wanted.group.me
        count = len(wanted.group.ranks)
        parts = grad.split([item_count(wanted.runs[me][k]) for k in range(count)], -2)
        sizes = [item_count(wanted.runs[k][me]) for k in range(count)]
        # Several ranks may have fetched the same rows, so their gradients add up.
        total_grad = grad.new_zeros((*grad.shape[:-2], rows, grad.shape[-1]))
        for k, part in enumerate(_exchange_parts(wanted, parts, sizes)):
            place = 0
            for start, size in wanted.runs[k][me]:
                total_grad[..., start : start + size, :] += part[..., place : place + size, :]
                place += size
        return total_grad

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _FetchKeys.apply(grad, ctx.wanted), None, None


def _rows_in_runs(x: Tensor, runs: Runs) -> Tensor:
    """Return the rows of ``x`` in the ranges ``runs``, concatenated."""
    parts = [x.narrow(-2, start, size) for start, size in runs]
    return torch.cat(parts, -2) if parts else x[..., :0, :]


def _exchange_parts(
    wanted: KeyRanges, parts: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor]:
    """Send ``parts[k]`` to the k-th rank, and return what arrives from each rank.

    The part from the k-th rank has ``sizes[k]`` rows; this rank keeps its own part.
    """
    group, like = wanted.group, parts[0]
    received = list(parts)
    sends = [(group.ranks[k], parts[k].contiguous()) for k in wanted.others if parts[k].shape[-2]]
    sources = [k for k in wanted.others if sizes[k]]
    shapes = [(*like.shape[:-2], sizes[k], like.shape[-1]) for k in sources]
    receives = [
        (group.ranks[k], shape, like.dtype) for k, shape in zip(sources, shapes, strict=True)
    ]
    for k in wanted.others:
        received[k] = like[..., :0, :]
    # The condition is the same on every rank, so that all or none of them enter the exchange.
    if any(runs for k, row in enumerate(wanted.runs) for j, runs in enumerate(row) if j != k):
        arrived = current().exchange(sends, receives, group.ranks, like.device)
        for k, x in zip(sources, arrived, strict=True):
            received[k] = x
    return received
