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
    """
    if src is dst and grad_sbp is None:
        return local
    with _HookOff():
        if _tracks(local):
            return _apply(_Box, local, src, dst, grad_sbp)
        return run(torch.Tensor.detach(local), src, dst)


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
