"""Differentiable communication other than boxing; backward mirrors forward.

These functions convert from and to a value that every rank has whole, take sums and extremes over
ranks, and exchange rows. Each backward is built from these functions and from ``box``, so it can be
differentiated any number of times. Shards may be of a Tensor subclass whose ``shape`` is the
logical one; results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current
from mirrored.transports.failures import counts_out_of_memory

from ..spec import B, Placement, TensorSpec
from .boxed import box
from .grad_mode import HookOff, apply, tracks
from .run import run
from .sparse_parts import meta_like
from .world import my_coordinate


@counts_out_of_memory
def shard_of_plain(whole: Tensor, dst: TensorSpec, alias: bool = False) -> Tensor:
    """Return this rank's shard under ``dst`` of a plain tensor ``whole``; differentiable.

    Every rank has ``whole``, with the same value, so forward sends nothing.

    ```
    forward    a ------> dst                       every rank has a, and keeps its part
    backward   dL/da <------ dual(dst)    every rank of the placement gets the whole gradient
    ```

    Ranks outside the placement get a ``meta`` shard, and no gradient. With ``alias`` a shard that
    is the whole tensor shares its storage; otherwise it is a copy.
    """
    if tracks((whole,)):
        return apply(_Spread, whole, dst, alias)
    if alias and dst is _broadcast_spec(dst) and my_coordinate(dst.placement) is not None:
        return whole
    return _shard_of_plain(whole, dst, alias)


def _shard_of_plain(whole: Tensor, dst: TensorSpec, alias: bool) -> Tensor:
    if my_coordinate(dst.placement) is None:
        return meta_like(whole, dst.local_shape(None), dst.dtype)
    src = _broadcast_spec(dst)
    if src is dst:
        return whole.detach() if alias else whole.detach().clone()
    return run(whole.detach(), src, dst)


def gather(local: Tensor, src: TensorSpec) -> Tensor:
    """Return the whole value as a plain tensor on every rank of the placement; differentiable.

    ``local`` is this rank's shard under ``src``. The backward of this function is the forward of
    ``shard_of_plain``, and the other way round.

    ```
    forward    src ------> result             where src is B, it shares the storage of ``local``
    backward   dual(src) <------ dL/dresult   each rank has the whole gradient, keeps its shard
    ```
    """
    with HookOff():
        if tracks((local,)):
            return apply(_Gather, local, src)
        if local.__class__ is Tensor and src is _broadcast_spec(src):
            return local
        return _gather(local, src)


def _gather(local: Tensor, src: TensorSpec) -> Tensor:
    dst, x = _broadcast_spec(src), torch.Tensor.detach(local)
    return x if src is dst else run(x, src, dst)


def copy_part_(local: Tensor, whole: Tensor, dst: TensorSpec) -> None:
    """Copy this rank's part of ``whole`` into its shard ``local``, in place; differentiable.

    It ends a call of an op that writes in place and that runs on whole tensors: ``whole`` is what
    ``gather(local, dst)`` returned, after the op has written to it. ``dst`` is the spec of
    ``local``.

    ```
    forward    a ------> dst, in place
    backward   dL/da <------ dual(dst)
    ```
    """
    with HookOff():
        if tracks((local, whole)):
            apply(_Land, local, whole, dst)
        else:
            _land(local, whole, dst)


def _land(local: Tensor, whole: Tensor, dst: TensorSpec) -> Tensor:
    src = _broadcast_spec(dst)
    if src is not dst and my_coordinate(dst.placement) is not None:
        torch.Tensor.copy_(local, run(torch.Tensor.detach(whole), src, dst))
    return local


def _broadcast_spec(spec: TensorSpec) -> TensorSpec:
    """Return ``spec`` with B on every axis: each rank has the whole tensor."""
    return spec.with_sbp((B,) * spec.placement.ndim)


def sum_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """Return the sum of the ranks' ``local`` over some axes of the placement; differentiable.

    It does ``P -> B`` for a tensor that has no spec, such as an intermediate value of an op.
    ``local`` may have any shape, which is the same on these ranks.

    ```
    forward    a        b        c       --->    a+b+c    a+b+c    a+b+c
    backward   x+y+z    x+y+z    x+y+z   <---      x        y        z
    ```
    """
    if my_coordinate(placement) is None:
        return local
    with HookOff():
        if tracks((local,)):
            return apply(_SumOver, local, placement, tuple(axes))
        return _reduce(local, placement, axes, "sum")


def max_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """Return the elementwise maximum of the ranks' ``local`` over axes of the placement.

    ``local`` has the same shape on these ranks. The function is not differentiable.
    """
    return local if my_coordinate(placement) is None else _reduce(local, placement, axes, "max")


def min_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """Return the elementwise minimum of the ranks' ``local`` over axes of the placement.

    ``local`` has the same shape on these ranks. The function is not differentiable.
    """
    return local if my_coordinate(placement) is None else _reduce(local, placement, axes, "min")


def exchange_rows(x: Tensor, counts: Tensor, me: int, ranks: Sequence[int]) -> Tensor:
    """Send rows to other ranks (all-to-all) and return those that this rank gets; differentiable.

    Mixture-of-experts layers use it to send tokens to the ranks of their experts.

    ```
    forward    a b | c      d | e f     --->    a b d      c e f        counts [2, 1], [1, 2]
    backward   rows go back the way they came
    ```

    Args:
        x: this rank's rows, sorted by the rank that they go to.
        counts: matrix of numbers of rows: ``counts[a, b]`` rows go from ``ranks[a]`` to
            ``ranks[b]``. In a compiled step they may differ from run to run, as long as
            each rank gets the same number of rows.
        me: position of this rank in ``ranks``.
        ranks: the ranks that take part.
    """
    with HookOff():
        if tracks((x,)):
            return apply(_Swap, x, counts, me, tuple(ranks))
        return _swap_rows(x, counts, me, tuple(ranks))


def _swap_rows(x: Tensor, counts: Tensor, position: int, ranks: tuple[int, ...]) -> Tensor:
    return current().as_one(_Rows(position, ranks), [torch.Tensor.detach(x), counts], ranks)[0]


@dataclass(frozen=True)
class _Rows:
    """``exchange_rows`` without autograd, as one callable that a compiled step can record.

    It is called with [rows, counts] and returns [the rows that this rank gets].
    """

    me: int
    ranks: tuple[int, ...]

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, counts = xs
        send_counts, receive_counts = counts[self.me].tolist(), counts[:, self.me].tolist()
        pieces = [piece.contiguous() for piece in x.split(send_counts)]
        shapes = [(n, *x.shape[1:]) for n in receive_counts]
        return [torch.cat(current().all_to_all(pieces, shapes, self.ranks))]


class _Spread(torch.autograd.Function):
    """Autograd Function of ``shard_of_plain``; the C++ code knows it by this name."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dst: TensorSpec, alias: bool) -> Tensor:
        ctx.dst = dst
        ctx.set_materialize_grads(False)
        return _shard_of_plain(whole, dst, alias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        dst = ctx.dst
        # A missing gradient is missing on all ranks, so that none of them waits in `gather`.
        if grad is None or my_coordinate(dst.placement) is None:
            return None, None, None
        return gather(grad, dst.dual), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return shard_of_plain(tangent, ctx.dst)


class _Gather(torch.autograd.Function):
    """Autograd Function of ``gather``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, src: TensorSpec) -> Tensor:
        ctx.src = src
        ctx.set_materialize_grads(False)
        return _gather(local, src)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if grad is None else shard_of_plain(grad, ctx.src.dual, alias=True)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        # `gather` may return `tangent` itself, and a jvp must not return its input.
        return gather(tangent, ctx.src).clone()


# Class of the autograd nodes that ``gather`` makes. Their ``src`` is the spec of the gathered
# shard.
GatherBackward: Any = _Gather._backward_cls  # type: ignore[attr-defined]


class _Land(torch.autograd.Function):
    """Autograd Function of ``copy_part_``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, whole: Tensor, dst: TensorSpec) -> Tensor:
        ctx.dst = dst
        ctx.mark_dirty(local)
        return _land(local, whole, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        # No gradient for ``local``, whose old value is overwritten.
        return None, gather(grad, ctx.dst.dual), None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *__: None) -> Tensor:
        return box(tangent, _broadcast_spec(ctx.dst), ctx.dst)


class _Swap(torch.autograd.Function):
    """Autograd Function of ``exchange_rows``; its backward sends the rows back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, me: int, ranks: tuple[int, ...]) -> Tensor:
        ctx.route = counts, me, ranks
        return _swap_rows(x, counts, me, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        counts, me, ranks = ctx.route
        return exchange_rows(grad, counts.T, me, ranks), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return exchange_rows(tangent, *ctx.route)


class _SumOver(torch.autograd.Function):
    """Autograd Function of ``sum_over``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Placement, axes: tuple[int, ...]) -> Tensor:
        ctx.route = placement, axes
        return _reduce(local, placement, axes, "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_over(grad, *ctx.route), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return sum_over(tangent, *ctx.route)


def _reduce(local: Tensor, placement: Placement, axes: Sequence[int], op: str) -> Tensor:
    """Return ``local`` reduced by ``op`` ("sum", "max" or "min") over ``axes``, as a new tensor.

    It takes one message if ``axes`` include all axes that have several ranks, else one for each
    axis.
    """
    with HookOff():
        x = torch.Tensor.detach(local)
        wide_axes = [axis for axis in axes if placement.shape[axis] > 1]
        if not wide_axes:
            return x.clone(memory_format=torch.contiguous_format)
        if len(wide_axes) > 1 and len(wide_axes) == sum(n > 1 for n in placement.shape):
            return current().all_reduce(x, tuple(placement.ranks.ravel().tolist()), op)
        coordinate = my_coordinate(placement)
        assert coordinate is not None
        for axis in wide_axes:
            x = current().all_reduce(x, placement.axis_ranks(axis, coordinate), op)
        return x
