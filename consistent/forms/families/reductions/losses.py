"""Forms of losses over split rows, elements or classes.

A mean is the shard's sum divided by the number of losses in all shards. Where classes are split, no
rank has a whole row of logits, so the ranks join the largest value and the sum of each row: a few
numbers per row, and no logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....movement.differentiable import max_over, sum_over
from ....movement.run import run
from ....rules.families.reductions.losses import class_dim, has_probabilities
from ....rules.notation import MEAN, NONE, SUM, reduction_of
from ....spec import B, S, Split, TensorSpec
from ...join_results import sum_addends, widen
from ...native import load as native
from ...refused import require
from ...registry import Shards, form
from .extremes import local_extreme


@form("mean_loss")
def _mean_loss(shard: Shards) -> Tensor:
    """Return the sum of the shard's losses divided by the logical number of losses.

    It is this rank's addend of the mean, so the result is P.
    """
    return _run_with_reduction(shard, SUM) / _loss_count(shard)


@form("half_loss")
def _half_loss(shard: Shards) -> Tensor:
    """Run the mean or sum of a loss in half precision, accumulated in float32.

    It is rounded once, at the end.
    """
    total = widen(_run_with_reduction(shard, NONE)).sum()
    mean = reduction_of(shard.call) == MEAN
    return sum_addends(shard, total / _loss_count(shard) if mean else total)


def _loss_count(shard: Shards) -> int:
    """Return the number of losses in all shards, by which a mean divides.

    It is one per row for margin losses other than soft_margin_loss and for cosine_embedding_loss,
    else one per element.
    """
    shapes = [spec.shape for spec in shard.specs]
    by_row = "margin_loss" in shard.call.name or shard.call.name == "cosine_embedding_loss"
    one_each = by_row and shard.call.name != "soft_margin_loss"
    return shapes[0][0] if one_each else math.prod(torch.broadcast_shapes(*shapes))


def _run_with_reduction(shard: Shards, reduction: int) -> Tensor:
    """Run a loss on the shard with another ``reduction`` than the call has."""
    args, kwargs = list(shard.args), dict(shard.kwargs)
    position = shard.call.params.index("reduction")
    if position < len(args):
        args[position] = reduction
    else:
        kwargs["reduction"] = reduction
    return shard.run(*args, **kwargs)


# -- one class out of many -------------------------------------------------------------------------


class _RowsAndClasses:
    """Helper of cross_entropy and nll_loss on this rank's rows and classes.

    It knows the axes that split rows, the axes that split classes, and the range of classes that
    this rank holds (``start``, ``held``).
    """

    def __init__(self, shard: Shards) -> None:
        self.shard, self.dim = shard, class_dim(shard.call)
        at_class = S(self.dim)
        entries = shard.specs[0].sbp
        self.class_axes = tuple(a for a in shard.axes if entries[a] is at_class)
        self.row_axes = tuple(
            a for a in shard.axes if isinstance(entries[a], Split) and entries[a] is not at_class
        )
        self.classes = shard.specs[0].shape[self.dim]
        ((self.start, self.held),) = shard.specs[0].runs(shard.coordinate)[self.dim]
        self.weight: Tensor | None = shard.get("weight")
        self.held_weight, self.total_weight = None, float(self.classes)
        if self.weight is not None:
            self.held_weight = self.weight.detach()[self.start : self.start + self.held]
            self.total_weight = self.weight.detach().sum()

    def reduce(self, losses: Tensor, count: Tensor | float | None = None) -> Tensor:
        """Reduce losses of shape [rows] by the call's ``reduction``.

        A mean divides by ``count``, the number (or weight) of rows in all shards.
        """
        reduction = reduction_of(self.shard.call)
        if reduction == NONE:
            return losses
        total = widen(losses).sum()
        if reduction == MEAN:
            assert count is not None
            total = total / count
        return self.all_reduce(total, self.row_axes)

    def all_reduce(self, total: Tensor, axes: tuple[int, ...]) -> Tensor:
        """All-reduce ``total`` over ``axes``.

        Along axes where the op's result is P, nothing is done: each rank keeps its own addend.
        """
        out = self.shard.outs[0]
        reduced_axes = tuple(a for a in axes if not out.sbp[a].is_partial)
        return sum_over(total, self.shard.placement, reduced_axes) if reduced_axes else total

    def check_targets(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Check the targets; return them as the loss uses them.

        Returns:
            (targets, with 0 for rows of ``ignore_index``; mask of the rows that are not ignored;
                class weight of each row's target, or None).

        Raises:
            IndexError: a target is not one of the classes.
        """
        valid = target != self.shard.get("ignore_index", -100)
        # ignore_index may be outside the classes, so replace it before the check.
        target = torch.where(valid, target, 0)
        is_class = (target >= 0) & (target < self.classes)
        text = f"{self.shard.call.name}: a target lies outside the {self.classes} classes"
        require(is_class.all(), text, IndexError)
        weight = None if self.weight is None else self.weight[target]
        return target, valid, weight

    def local_targets(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each row's target is among the classes that this rank holds.

        Returns:
            (index of the target, or 0 if another rank holds it, with the class dim for gather and
                scatter; mask of the rows whose target is held here).
        """
        place = target - self.start
        is_held = (place >= 0) & (place < self.held)
        return torch.where(is_held, place, 0).unsqueeze(self.dim), is_held

    def values_at_targets(self, x: Tensor, target: Tensor) -> Tensor:
        """Return x[target] of each row, or 0 where another rank holds that class."""
        if self.held == 0:
            return x.sum(self.dim)  # zeros, with a graph as on the other ranks
        place, is_held = self.local_targets(target)
        return torch.where(is_held, x.gather(self.dim, place).squeeze(self.dim), 0)

    def scatter_at_targets(self, values: Tensor, target: Tensor, like: Tensor) -> Tensor:
        """Return zeros like ``like`` with ``values``, one per row, at each row's target class.

        Rows whose target another rank holds are all zeros.
        """
        if self.held == 0:
            return torch.zeros_like(like)
        place, is_held = self.local_targets(target)
        held_values = torch.where(is_held, values, 0).unsqueeze(self.dim)
        return torch.zeros_like(like).scatter(self.dim, place, held_values)

    def gather(self, x: Tensor) -> Tensor:
        """Gather ``x`` of shape [...] from the ranks that split the classes, as [ranks, ...]."""
        placement, axes = self.shard.placement, self.class_axes
        entries = tuple(S(0) if a in axes else B for a in range(placement.ndim))
        shape = (math.prod(placement.shape[a] for a in axes), *x.shape)
        src = TensorSpec.of(placement, entries, shape, x.dtype)
        return run(x.unsqueeze(0), src, src.with_sbp((B,) * placement.ndim))

    def mean_divisor(self, valid: Tensor, weight: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the number by which a mean divides, or None if the call's reduction is another.

        It is the number of rows in all shards that are not ignored, or the sum of their weights.
        ``like`` gives the dtype.
        """
        if reduction_of(self.shard.call) != MEAN:
            return None
        with torch.no_grad():
            weights = (
                valid.to(like.dtype)
                if weight is None
                else torch.where(valid, weight.to(like.dtype), 0)
            )
            return sum_over(weights.sum(), self.shard.placement, self.row_axes)

    def slice_classes(self, by_class: Tensor, x: Tensor) -> Tensor:
        """Cut ``by_class``, a vector over all classes, to the classes that this rank holds.

        It is shaped to broadcast to ``x``.
        """
        shape = [1] * x.ndim
        shape[self.dim] = self.held
        return by_class[self.start : self.start + self.held].reshape(shape)


@form("nll_loss", raises_first=True)
def _nll(shard: Shards) -> Tensor:
    """Run nll_loss: each rank contributes the rows whose target class it holds."""
    rows, x = _RowsAndClasses(shard), shard.tensors[0]
    target, valid, weight = rows.check_targets(shard.tensors[1])
    losses = torch.where(valid, -rows.values_at_targets(x, target), 0)
    if weight is not None:
        losses = losses * weight
    reduced = rows.reduce(losses, rows.mean_divisor(valid, weight, widen(x)))
    return rows.all_reduce(reduced, rows.class_axes).to(shard.outs[0].dtype)


@form("cross_entropy", raises_first=True)
def _cross_entropy(shard: Shards) -> Tensor:
    rows = _RowsAndClasses(shard)
    if has_probabilities(shard.call):
        return _probability_cross_entropy(rows, widen(shard.tensors[0])).to(shard.outs[0].dtype)
    return _index_cross_entropy(rows, shard.tensors[0]).to(shard.outs[0].dtype)


def _index_cross_entropy(rows: _RowsAndClasses, x: Tensor) -> Tensor:
    """Return cross_entropy for target indices, which is -log p[target] for each row.

    With label smoothing this is mixed with -sum over classes of weight * log p / classes.
    """
    target, valid, weight = rows.check_targets(rows.shard.tensors[1].to(torch.int64))
    losses = torch.where(valid, _SplitCrossEntropy.apply(x, rows, target, weight), 0)
    return _SumGradient.apply(rows.reduce(losses, rows.mean_divisor(valid, weight, losses)), rows)


class _SumGradient(torch.autograd.Function):
    """Identity on a loss that all ranks of split classes have, with a summed gradient.

    Each rank has used the loss, so the gradient that goes on is the sum of the ranks' gradients.

    ```
    forward    a        a        a       --->    a        a        a
    backward   x+y+z    x+y+z    x+y+z   <---    x        y        z
    ```
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, rows: _RowsAndClasses) -> Tensor:
        ctx.rows = rows
        return loss.clone()  # a caller may write to the result in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.rows.shard.placement, ctx.rows.class_axes), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()


class _SplitCrossEntropy(torch.autograd.Function):
    """Compute the cross entropy of each row, [rows], from logits whose classes are split.

    It reads the logits once in each direction.

    ```
    forward    each rank finds over its classes: largest, sum, x[target]; all gather these
    backward   each rank makes its classes' gradient from the loss's and those numbers
    ```
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: _RowsAndClasses, target: Tensor, weight: Tensor | None
    ) -> Tensor:
        smoothing = rows.shard.get("label_smoothing", 0.0)
        statistics = rows.gather(
            native.split_cross_entropy(
                x, target, rows.held_weight, rows.dim, rows.start, smoothing != 0
            )
        )
        largest = statistics[:, 0].amax(0)
        # A row of -inf only has no maximum to subtract: -inf - -inf would be NaN.
        reference = torch.where(largest == -math.inf, 0, largest)
        total = (statistics[:, 1] * (statistics[:, 0] - reference).exp()).sum(0)
        smooth = smoothing / max(1, rows.classes)
        target_scale = torch.full_like(total, 1 - smoothing)
        if weight is not None:
            target_scale *= weight
        total_scale = target_scale + smooth * rows.total_weight
        losses = total_scale * total.log() - target_scale * (statistics[:, 2].sum(0) - reference)
        if smoothing:
            rank_reference = torch.where(statistics[:, 0] == -math.inf, 0, statistics[:, 0])
            losses -= smooth * (
                statistics[:, 3] + statistics[:, 4] * (rank_reference - reference)
            ).sum(0)
        ctx.save_for_backward(x, target)
        ctx.rows, ctx.numbers = rows, (reference, total, target_scale, total_scale, smooth)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _logits_gradient(ctx, grad), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        rows, ones = ctx.rows, torch.ones_like(ctx.numbers[1])
        directional = (_logits_gradient(ctx, ones) * tangent).sum(rows.dim, dtype=ones.dtype)
        return sum_over(directional, rows.shard.placement, rows.class_axes)


def _logits_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """Return the gradient of this rank's logits, from ``grad``, that of the losses.

    For second derivatives it is computed by torch's own ops, else by a fused kernel. ``ctx`` is
    that of ``_SplitCrossEntropy``.
    """
    rows, (reference, total, target_scale, total_scale, smooth) = ctx.rows, ctx.numbers
    x, target = ctx.saved_tensors
    if not torch.is_grad_enabled():
        numbers = torch.stack(
            [reference, grad * total_scale / total, grad * smooth, grad * target_scale]
        )
        return native.split_cross_entropy_backward(
            x, target, numbers, rows.held_weight, rows.dim, rows.start
        )
    powers = (widen(x) - reference.unsqueeze(rows.dim)).exp()
    total = sum_over(powers.sum(rows.dim), rows.shard.placement, rows.class_axes)
    result = powers * (grad * total_scale / total).unsqueeze(rows.dim)
    if smooth:
        by_class = 1.0 if rows.weight is None else rows.slice_classes(rows.weight, x)
        result = result - (grad * smooth).unsqueeze(rows.dim) * by_class
    return (result - rows.scatter_at_targets(grad * target_scale, target, result)).to(x.dtype)


def _probability_cross_entropy(rows: _RowsAndClasses, x: Tensor) -> Tensor:
    """Return cross_entropy for target probabilities, with the call's reduction.

    The loss of a row is -sum over classes of weight * target * log p.
    """
    smoothing = rows.shard.get("label_smoothing", 0.0)
    target = rows.shard.tensors[1].to(x.dtype) * (1 - smoothing) + smoothing / rows.classes
    if rows.weight is not None:
        target = target * rows.slice_classes(rows.weight, x)
    placement = rows.shard.placement
    shifted = x - max_over(local_extreme(x.detach(), (rows.dim,), True), placement, rows.class_axes)
    addends = [shifted.exp(), shifted * target, target]
    sums = sum_over(torch.stack([t.sum(rows.dim) for t in addends]), placement, rows.class_axes)
    total, weighted, weights = sums.unbind(0)
    return rows.reduce(
        total.log() * weights - weighted, rows.shard.specs[0].numel / max(1, rows.classes)
    )
