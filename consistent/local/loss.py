"""Losses over split rows, elements or classes.

A mean is the shard's sum over the count of all shards. Split classes: no rank sees a whole row of
logits, so the rows' largest values and sums are joined, [rows] each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..boxing.differentiable import max_over, sum_over
from ..rules.loss import MEAN, NONE, SUM, class_dim, has_probabilities, reduction_of
from ..spec import S, Split
from .forms import Shards, form
from .reduce import local_extreme, wide


@form("mean_loss")
def _mean_loss(shard: Shards) -> Tensor:
    """Sum of the shard's losses over their logical number: P."""
    shapes = [spec.shape for spec in shard.specs]
    by_row = "margin_loss" in shard.call.name or shard.call.name == "cosine_embedding_loss"
    one_each = by_row and shard.call.name != "soft_margin_loss"
    count = shapes[0][0] if one_each else math.prod(torch.broadcast_shapes(*shapes))
    return _run_with(shard, SUM) / count


def _run_with(shard: Shards, reduction: int) -> Tensor:
    """The op on the shard with another reduction."""
    args, kwargs = list(shard.args), dict(shard.kwargs)
    position = shard.call.params.index("reduction")
    if position < len(args):
        args[position] = reduction
    else:
        kwargs["reduction"] = reduction
    return shard.run(*args, **kwargs)


# -- one class out of many -------------------------------------------------------------------------


class _Rows:
    """What cross_entropy and nll_loss share: which axes split rows, which split classes, and the
    target's place."""

    def __init__(self, shard: Shards) -> None:
        self.shard, self.dim = shard, class_dim(shard.call)
        at_class = S(self.dim)
        entries = shard.specs[0].sbp
        self.class_axes = tuple(a for a in shard.axes if entries[a] is at_class)
        self.row_axes = tuple(
            a for a in shard.axes if isinstance(entries[a], Split) and entries[a] is not at_class
        )
        self.classes = shard.specs[0].shape[self.dim]
        starts, sizes = shard.box()
        self.start, self.held = starts[self.dim], sizes[self.dim]
        self.weight: Tensor | None = shard.get("weight")

    def reduce(self, losses: Tensor, count: Tensor | float | None = None) -> Tensor:
        """Losses, [rows], as the call wants them; their mean is over ``count`` of all shards."""
        reduction = reduction_of(self.shard.call)
        if reduction == NONE:
            return losses
        total = losses.sum()
        if reduction != MEAN:
            return total
        assert count is not None
        return total / count

    def find(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(target with 0 where it is ignored, which rows are not, each row's weight)."""
        valid = target != self.shard.get("ignore_index", -100)
        target = torch.where(valid, target, 0)
        inside = (target >= 0) & (target < self.classes)
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            inside.all(),
            f"{self.shard.call.name}: a target lies outside the {self.classes} classes",
        )
        weight = None if self.weight is None else self.weight[target]
        return target, valid, weight

    def pick(self, x: Tensor, target: Tensor) -> Tensor:
        """x[target] of each row, 0 where another rank holds that class."""
        if self.held == 0:
            return x.sum(self.dim)
        place = target - self.start
        mine = (place >= 0) & (place < self.held)
        picked = x.gather(self.dim, torch.where(mine, place, 0).unsqueeze(self.dim)).squeeze(
            self.dim
        )
        return torch.where(mine, picked, 0)

    def count(self, valid: Tensor, weight: Tensor | None, like: Tensor) -> Tensor | None:
        """Number (or weight) of the rows of all shards that are not ignored; None where no mean
        is asked for."""
        if reduction_of(self.shard.call) != MEAN:
            return None
        with torch.no_grad():
            counted = (
                valid.to(like.dtype)
                if weight is None
                else torch.where(valid, weight.to(like.dtype), 0)
            )
            return sum_over(counted.sum(), self.shard.placement, self.row_axes)

    def sliced(self, by_class: Tensor, x: Tensor) -> Tensor:
        """A vector over all classes, cut to those held here and shaped to meet ``x``."""
        shape = [1] * x.ndim
        shape[self.dim] = self.held
        return by_class[self.start : self.start + self.held].reshape(shape)


@form("nll")
def _nll(shard: Shards) -> Tensor:
    """A rank adds the rows whose class it holds: P."""
    rows, x = _Rows(shard), shard.tensors[0]
    target, valid, weight = rows.find(shard.tensors[1])
    losses = torch.where(valid, -rows.pick(x, target), 0)
    if weight is not None:
        losses = losses * weight
    return rows.reduce(losses, rows.count(valid, weight, x))


@form("cross_entropy")
def _cross_entropy(shard: Shards) -> Tensor:
    rows = _Rows(shard)
    of = _of_probabilities if has_probabilities(shard.call) else _of_indices
    return of(rows, wide(shard.tensors[0])).to(shard.outs[0].dtype)


def _joined(rows: _Rows, x: Tensor, terms: Any) -> tuple[Tensor, ...]:
    """(log of the sum of exponentials, *joined terms), [rows] each; ``terms`` get logits less
    the row's largest."""
    placement = rows.shard.placement
    shifted = x - max_over(local_extreme(x.detach(), (rows.dim,), True), placement, rows.class_axes)
    mine = [shifted.exp().sum(rows.dim), *terms(shifted)]
    total, *others = sum_over(torch.stack(mine), placement, rows.class_axes).unbind(0)
    return (total.log(), *others)


def _of_indices(rows: _Rows, x: Tensor) -> Tensor:
    """-log p[target], smoothed with -sum over classes of weight * log p / classes."""
    smoothing = rows.shard.get("label_smoothing", 0.0)
    target, valid, weight = rows.find(rows.shard.tensors[1])

    def terms(shifted: Tensor) -> list[Tensor]:
        every = shifted if rows.weight is None else shifted * rows.sliced(rows.weight, x)
        return [rows.pick(shifted, target)] + ([every.sum(rows.dim)] if smoothing else [])

    log_total, picked, *smooth = _joined(rows, x, terms)
    losses = log_total - picked
    if weight is not None:
        losses = losses * weight
    if smoothing:
        total_weight = rows.classes if rows.weight is None else rows.weight.sum()
        losses = (1 - smoothing) * losses + smoothing / rows.classes * (
            log_total * total_weight - smooth[0]
        )
    return rows.reduce(torch.where(valid, losses, 0), rows.count(valid, weight, x))


def _of_probabilities(rows: _Rows, x: Tensor) -> Tensor:
    """-sum over classes of weight * target * log p."""
    smoothing = rows.shard.get("label_smoothing", 0.0)
    target = rows.shard.tensors[1].to(x.dtype) * (1 - smoothing) + smoothing / rows.classes
    if rows.weight is not None:
        target = target * rows.sliced(rows.weight, x)

    log_total, weighted, weights = _joined(
        rows, x, lambda shifted: [(shifted * target).sum(rows.dim), target.sum(rows.dim)]
    )
    return rows.reduce(
        log_total * weights - weighted, rows.shard.specs[0].numel / max(1, rows.classes)
    )
