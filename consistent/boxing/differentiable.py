"""Boxing under autograd, forward and backward as mirror images.

    forward     src ------> dst
    backward    dual(src) <------ dual(dst)

The backward of boxing is boxing, so it is built from itself and can be differentiated any number of
times. Locals may be of a Tensor subclass whose ``shape`` is the logical one; results are plain
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mirrored import comm

from ..spec import B, NdSbp, Placement, TensorSpec
from .run import here, run

_HookOff = torch._C.DisableTorchFunctionSubclass


def box(local: Tensor, src: TensorSpec, dst: TensorSpec, grad_sbp: NdSbp | None = None) -> Tensor:
    """This rank's shard under ``dst``, from its shard under ``src``; differentiable.

    ``grad_sbp`` says where the gradient stops over on its way from ``dst.dual`` to ``src.dual``.
    Without it, ``src`` to itself returns ``local``.

    Raises:
        ValueError: an end is P(max) or P(min), and gradients are asked for.
    """
    if src is dst and grad_sbp is None:
        return local
    with _HookOff():
        if _tracks(local) and not _is_forward_only(local, src, dst):
            return _apply(_Box, local, src, dst, grad_sbp)
        return run(torch.Tensor.detach(local), src, dst)


def _is_forward_only(local: Tensor, src: TensorSpec, dst: TensorSpec) -> bool:
    """Whether an end is P(max) or P(min), through which no derivative goes."""
    ends = [e for spec in (src, dst) for e in spec.sbp if e.is_extreme]
    if not ends:
        return False
    if local.requires_grad or forward_ad.unpack_dual(local).tangent is not None:
        raise ValueError(
            f"boxing: {ends[0]} has no derivative, for no rank knows alone which of them wins, and "
            f"x requires grad.\n  x is {src}, the target is {dst}.\n"
            "  Box to S or B, or x.detach()."
        )
    return True


def spread(whole: Tensor, dst: TensorSpec) -> Tensor:
    """This rank's shard under ``dst`` of a plain tensor that every rank has whole; differentiable.

    ```
    forward    a ------> dst                       every rank has a, and keeps its part
    backward   dL/da <------ dual(dst)    every rank of the placement gets the whole gradient
    ```

    Ranks outside the placement get a ``meta`` shard, and no gradient.
    """
    if _tracks(whole):
        return _apply(_Spread, whole, dst)
    return _spread(whole, dst)


def _spread(whole: Tensor, dst: TensorSpec) -> Tensor:
    if here(dst.placement) is None:
        return torch.empty(dst.local_shape(None), dtype=dst.dtype, device="meta")
    src = _everywhere(dst)
    return whole.detach().clone() if src is dst else run(whole.detach(), src, dst)


def _everywhere(spec: TensorSpec) -> TensorSpec:
    return spec.with_sbp((B,) * spec.placement.ndim)


def sum_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The sum over ``axes`` of the ranks' ``local``, of any shape. ``P -> B``, differentiable.

    ```
    forward    a        b        c       --->    a+b+c    a+b+c    a+b+c
    backward   x+y+z    x+y+z    x+y+z   <---      x        y        z
    ```
    """
    if here(placement) is None:
        return local
    with _HookOff():
        if _tracks(local):
            return _apply(_SumOver, local, placement, tuple(axes))
        return _reduce(local, placement, axes, "sum")


def max_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The elementwise largest of the ranks' ``local`` over ``axes``; not differentiable."""
    return local if here(placement) is None else _reduce(local, placement, axes, "max")


def min_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The elementwise smallest of the ranks' ``local`` over ``axes``; not differentiable."""
    return local if here(placement) is None else _reduce(local, placement, axes, "min")


def swap(x: Tensor, going: Sequence[int], coming: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """Rows change hands: ``going[k]`` of ``x``, in order, go to ``ranks[k]``; from there come
    ``coming[k]``. Differentiable.

    ```
    forward    a b | c      d | e f     --->    a b d      c e f        going 2, 1  and  1, 2
    backward   rows go back the way they came
    ```
    """
    with _HookOff():
        if _tracks(x):
            return _apply(_Swap, x, tuple(going), tuple(coming), tuple(ranks))
        return _swapped(x, going, coming, ranks)


def _swapped(
    x: Tensor, going: Sequence[int], coming: Sequence[int], ranks: Sequence[int]
) -> Tensor:
    pieces = [piece.contiguous() for piece in torch.Tensor.detach(x).split(list(going))]
    shapes = [(n, *x.shape[1:]) for n in coming]
    return torch.cat(comm.current().all_to_all(pieces, shapes, tuple(ranks)))


class _Box(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, src: TensorSpec, dst: TensorSpec, grad_sbp: NdSbp | None
    ) -> Tensor:
        ctx.route = src, dst, grad_sbp
        with _HookOff():
            x = torch.Tensor.detach(local)
            # src to itself, wanted for its grad_sbp alone, returns x: an output must not be an
            # input's alias.
            return x.clone() if src is dst else run(x, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        src, dst, grad_sbp = ctx.route
        if grad_sbp is None:
            return box(grad, dst.dual, src.dual), None, None, None
        stop = dst.with_sbp(grad_sbp)
        return box(box(grad, dst.dual, stop), stop, src.dual), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        src, dst, _grad_sbp = ctx.route
        return tangent.clone() if src is dst else box(tangent, src, dst)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dst: TensorSpec) -> Tensor:
        ctx.dst = dst
        return _spread(whole, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        dst = ctx.dst
        if here(dst.placement) is None:
            return None, None
        return box(grad, dst.dual, _everywhere(dst)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return spread(tangent, ctx.dst)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *route: tuple[int, ...]) -> Tensor:
        ctx.route = route
        return _swapped(x, *route)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        going, coming, ranks = ctx.route
        return swap(grad, coming, going, ranks), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return swap(tangent, *ctx.route)


class _SumOver(torch.autograd.Function):
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
    """``local`` combined over ``axes``, in one group if no other axis has ranks; a new tensor."""
    with _HookOff():
        x = torch.Tensor.detach(local)
        wide = [axis for axis in axes if placement.shape[axis] > 1]
        if not wide:
            return x.clone(memory_format=torch.contiguous_format)
        if len(wide) > 1 and len(wide) == sum(n > 1 for n in placement.shape):
            return comm.current().all_reduce(x, tuple(placement.ranks.ravel().tolist()), op)
        at = here(placement)
        assert at is not None
        for axis in wide:
            x = comm.current().all_reduce(x, placement.axis_ranks(axis, at), op)
        return x


def _tracks(x: Tensor) -> bool:
    """Whether autograd, reverse or forward mode, follows ``x``."""
    return (torch.is_grad_enabled() and x.requires_grad) or forward_ad._current_level >= 0


def _apply(function: Any, *args: Any) -> Any:
    """``function.apply``, past what guards users' own autograd functions from global tensors."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "boxing: a torch.func transform (grad, vmap) is active.\n"
            "  It would see this rank's shard only, and boxing moves data between ranks.\n"
            "  Use autograd (torch.autograd.grad, backward) on global tensors."
        )
    past_guard: Any = super(torch.autograd.Function, function)
    return past_guard.apply(*args)
