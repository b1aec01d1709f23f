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
from ...join_results import summed, wide
from ...native import load as native
from ...refused import need
from ...registry import Shards, form
from .extremes import local_extreme


@form("mean_loss")
def _mean_loss(shard: Shards) -> Tensor:
    """Return the sum of the shard's losses divided by the logical number of losses.

    It is this rank's addend of the mean, so the result is P.
    """
    return _run_with(shard, SUM) / _count(shard)


@form("half_loss")
def _half_loss(shard: Shards) -> Tensor:
    """Run the mean or sum of a loss in half precision, accumulated in float32.

    It is rounded once, at the end.
    """
    total = wide(_run_with(shard, NONE)).sum()
    mean = reduction_of(shard.call) == MEAN
    return summed(shard, total / _count(shard) if mean else total)


def _count(shard: Shards) -> int:
    """Return the number of losses in all shards, by which a mean divides.

    It is one per row for margin losses other than soft_margin_loss and for cosine_embedding_loss,
    else one per element.
    """
    shapes = [spec.shape for spec in shard.specs]
    by_row = "margin_loss" in shard.call.name or shard.call.name == "cosine_embedding_loss"
    one_each = by_row and shard.call.name != "soft_margin_loss"
    return shapes[0][0] if one_each else math.prod(torch.broadcast_shapes(*shapes))


def _run_with(shard: Shards, reduction: int) -> Tensor:
    """Run a loss on the shard with another ``reduction`` than the call has."""
    args, kwargs = list(shard.args), dict(shard.kwargs)
    position = shard.call.params.index("reduction")
    if position < len(args):
        args[position] = reduction
    else:
        kwargs["reduction"] = reduction
    return shard.run(*args, **kwargs)


# -- one class out of many -------------------------------------------------------------------------


class _Rows:
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
        total = wide(losses).sum()
        if reduction == MEAN:
            assert count is not None
            total = total / count
        return self.joined(total, self.row_axes)

    def joined(self, total: Tensor, axes: tuple[int, ...]) -> Tensor:
        """All-reduce ``total`` over ``axes``.

        Along axes where the op's result is P, nothing is done: each rank keeps its own addend.
        """
        out = self.shard.outs[0]
        whole = tuple(a for a in axes if not out.sbp[a].is_partial)
        return sum_over(total, self.shard.placement, whole) if whole else total

    def find(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
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
        inside = (target >= 0) & (target < self.classes)
        text = f"{self.shard.call.name}: a target lies outside the {self.classes} classes"
        need(inside.all(), text, IndexError)
        weight = None if self.weight is None else self.weight[target]
        return target, valid, weight

    def place(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each row's target is among the classes that this rank holds.

        Returns:
            (index of the target, or 0 if another rank holds it, with the class dim for gather and
                scatter; mask of the rows whose target is held here).
        """
        place = target - self.start
        mine = (place >= 0) & (place < self.held)
        return torch.where(mine, place, 0).unsqueeze(self.dim), mine

    def pick(self, x: Tensor, target: Tensor) -> Tensor:
        """Return x[target] of each row, or 0 where another rank holds that class."""
        if self.held == 0:
            return x.sum(self.dim)  # zeros, with a graph as on the other ranks
        place, mine = self.place(target)
        return torch.where(mine, x.gather(self.dim, place).squeeze(self.dim), 0)

    def put(self, values: Tensor, target: Tensor, like: Tensor) -> Tensor:
        """Return zeros like ``like`` with ``values``, one per row, at each row's target class.

        Rows whose target another rank holds are all zeros.
        """
        if self.held == 0:
            return torch.zeros_like(like)
        place, mine = self.place(target)
        own = torch.where(mine, values, 0).unsqueeze(self.dim)
        return torch.zeros_like(like).scatter(self.dim, place, own)

    def gather(self, x: Tensor) -> Tensor:
        """Gather ``x`` of shape [...] from the ranks that split the classes, as [ranks, ...]."""
        placement, axes = self.shard.placement, self.class_axes
        entries = tuple(S(0) if a in axes else B for a in range(placement.ndim))
        shape = (math.prod(placement.shape[a] for a in axes), *x.shape)
        src = TensorSpec.of(placement, entries, shape, x.dtype)
        return run(x.unsqueeze(0), src, src.with_sbp((B,) * placement.ndim))

    def count(self, valid: Tensor, weight: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the number by which a mean divides, or None if the call's reduction is another.

        It is the number of rows in all shards that are not ignored, or the sum of their weights.
        ``like`` gives the dtype.
        """
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
        """Cut ``by_class``, a vector over all classes, to the classes that this rank holds.

        It is shaped to broadcast to ``x``.
        """
        shape = [1] * x.ndim
        shape[self.dim] = self.held
        return by_class[self.start : self.start + self.held].reshape(shape)


@form("nll_loss", raises_first=True)
def _nll(shard: Shards) -> Tensor:
    """Run nll_loss: each rank contributes the rows whose target class it holds."""
    rows, x = _Rows(shard), shard.tensors[0]
    target, valid, weight = rows.find(shard.tensors[1])
    losses = torch.where(valid, -rows.pick(x, target), 0)
    if weight is not None:
        losses = losses * weight
    reduced = rows.reduce(losses, rows.count(valid, weight, wide(x)))
    return rows.joined(reduced, rows.class_axes).to(shard.outs[0].dtype)


@form("cross_entropy", raises_first=True)
def _cross_entropy(shard: Shards) -> Tensor:
    rows = _Rows(shard)
    if has_probabilities(shard.call):
        return _of_probabilities(rows, wide(shard.tensors[0])).to(shard.outs[0].dtype)
    return _of_indices(rows, shard.tensors[0]).to(shard.outs[0].dtype)


def _of_indices(rows: _Rows, x: Tensor) -> Tensor:
    """Return cross_entropy for target indices, which is -log p[target] for each row.

    With label smoothing this is mixed with -sum over classes of weight * log p / classes.
    """
    target, valid, weight = rows.find(rows.shard.tensors[1].to(torch.int64))
    losses = torch.where(valid, _FromLogits.apply(x, rows, target, weight), 0)
    return _Shared.apply(rows.reduce(losses, rows.count(valid, weight, losses)), rows)


class _Shared(torch.autograd.Function):
    """Identity on a loss that all ranks of split classes have, with a summed gradient.

    Each rank has used the loss, so the gradient that goes on is the sum of the ranks' gradients.

    ```
    forward    a        a        a       --->    a        a        a
    backward   x+y+z    x+y+z    x+y+z   <---    x        y        z
    ```
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, rows: _Rows) -> Tensor:
        ctx.rows = rows
        return loss.clone()  # a caller may write to the result in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.rows.shard.placement, ctx.rows.class_axes), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()


class _FromLogits(torch.autograd.Function):
    """Compute the cross entropy of each row, [rows], from logits whose classes are split.

    It reads the logits once in each direction.

    ```
    forward    each rank finds over its classes: largest, sum, x[target]; all gather these
    backward   each rank makes its classes' gradient from the loss's and those numbers
    ```
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows, target: Tensor, weight: Tensor | None) -> Tensor:
        smoothing = rows.shard.get("label_smoothing", 0.0)
        said = rows.gather(
            native.split_cross_entropy(
                x, target, rows.held_weight, rows.dim, rows.start, smoothing != 0
            )
        )
        largest = said[:, 0].amax(0)
        # A row of -inf only has no maximum to subtract: -inf - -inf would be NaN.
        reference = torch.where(largest == -math.inf, 0, largest)
        total = (said[:, 1] * (said[:, 0] - reference).exp()).sum(0)
        smooth = smoothing / max(1, rows.classes)
        chosen = torch.full_like(total, 1 - smoothing)
        if weight is not None:
            chosen *= weight
        every = chosen + smooth * rows.total_weight
        losses = every * total.log() - chosen * (said[:, 2].sum(0) - reference)
        if smoothing:
            own = torch.where(said[:, 0] == -math.inf, 0, said[:, 0])
            losses -= smooth * (said[:, 3] + said[:, 4] * (own - reference)).sum(0)
        ctx.save_for_backward(x, target)
        ctx.rows, ctx.numbers = rows, (reference, total, chosen, every, smooth)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx, grad), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        rows, ones = ctx.rows, torch.ones_like(ctx.numbers[1])
        sloped = (_gradient(ctx, ones) * tangent).sum(rows.dim, dtype=ones.dtype)
        return sum_over(sloped, rows.shard.placement, rows.class_axes)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    """Return the gradient of this rank's logits, from ``grad``, that of the losses.

    For second derivatives it is computed by torch's own ops, else by a fused kernel. ``ctx`` is
    that of ``_FromLogits``.
    """
    rows, (reference, total, chosen, every, smooth) = ctx.rows, ctx.numbers
    x, target = ctx.saved_tensors
    if not torch.is_grad_enabled():
        numbers = torch.stack([reference, grad * every / total, grad * smooth, grad * chosen])
        return native.split_cross_entropy_backward(
            x, target, numbers, rows.held_weight, rows.dim, rows.start
        )
    powers = (wide(x) - reference.unsqueeze(rows.dim)).exp()
    total = sum_over(powers.sum(rows.dim), rows.shard.placement, rows.class_axes)
    made = powers * (grad * every / total).unsqueeze(rows.dim)
    if smooth:
        by_class = 1.0 if rows.weight is None else rows.sliced(rows.weight, x)
        made = made - (grad * smooth).unsqueeze(rows.dim) * by_class
    return (made - rows.put(grad * chosen, target, made)).to(x.dtype)


def _of_probabilities(rows: _Rows, x: Tensor) -> Tensor:
    """Return cross_entropy for target probabilities, with the call's reduction.

    The loss of a row is -sum over classes of weight * target * log p.
    """
    smoothing = rows.shard.get("label_smoothing", 0.0)
    target = rows.shard.tensors[1].to(x.dtype) * (1 - smoothing) + smoothing / rows.classes
    if rows.weight is not None:
        target = target * rows.sliced(rows.weight, x)
    placement = rows.shard.placement
    shifted = x - max_over(local_extreme(x.detach(), (rows.dim,), True), placement, rows.class_axes)
    mine = [shifted.exp(), shifted * target, target]
    joined = sum_over(torch.stack([t.sum(rows.dim) for t in mine]), placement, rows.class_axes)
    total, weighted, weights = joined.unbind(0)
    return rows.reduce(
        total.log() * weights - weighted, rows.shard.specs[0].numel / max(1, rows.classes)
    )
