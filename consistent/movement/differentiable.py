"""Boxing under autograd, forward and backward as mirror images.

    forward     src ------> dst
    backward    dual(src) <------ dual(dst)

The backward of boxing is boxing, so it is built from itself and can be differentiated any number of
times. Locals may be of a Tensor subclass whose ``shape`` is the logical one; results are plain
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mirrored.transports.default import current
from mirrored.transports.failures import counts_lacks

from ..spec import B, NdSbp, Placement, TensorSpec
from .grad_mode import tracks
from .run import run
from .world import my_coordinate

_HookOff = torch._C.DisableTorchFunctionSubclass


def box(
    local: Tensor,
    src: TensorSpec,
    dst: TensorSpec,
    grad_sbp: NdSbp | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """This rank's shard under ``dst``, from its shard under ``src``; differentiable.

    ``grad_sbp`` is an SBP that the gradient is boxed to on its way from ``dst.dual`` to
    ``src.dual``. Without it, ``src`` to itself returns ``local``. ``arrived`` is the result,
    where it was made in advance.

    Raises:
        ValueError: ``src`` or ``dst`` is P(max) or P(min), and gradients are asked for.
    """
    if src is dst and grad_sbp is None:
        return local
    with _HookOff():
        if tracks((local,)) and not _is_forward_only(local, src, dst):
            # Not as an argument of its own, or autograd would take the result for a view of it.
            return _apply(_Box, local, src, dst, grad_sbp, None if arrived is None else (arrived,))
        return run(torch.Tensor.detach(local), src, dst) if arrived is None else arrived


def _is_forward_only(local: Tensor, src: TensorSpec, dst: TensorSpec) -> bool:
    """Whether ``src`` or ``dst`` is P(max) or P(min), which have no derivative."""
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


@counts_lacks
def spread(whole: Tensor, dst: TensorSpec, alias: bool = False) -> Tensor:
    """This rank's shard under ``dst`` of a plain tensor that every rank has whole; differentiable.

    ```
    forward    a ------> dst                       every rank has a, and keeps its part
    backward   dL/da <------ dual(dst)    every rank of the placement gets the whole gradient
    ```

    Ranks outside the placement get a ``meta`` shard, and no gradient. With ``alias`` a shard that
    is the whole shares its storage.
    """
    if tracks((whole,)):
        return _apply(_Spread, whole, dst, alias)
    if alias and dst is _everywhere(dst) and my_coordinate(dst.placement) is not None:
        return whole
    return _spread(whole, dst, alias)


def _spread(whole: Tensor, dst: TensorSpec, alias: bool) -> Tensor:
    if my_coordinate(dst.placement) is None:
        return torch.empty(dst.local_shape(None), dtype=dst.dtype, device="meta")
    src = _everywhere(dst)
    if src is dst:
        return whole.detach() if alias else whole.detach().clone()
    return run(whole.detach(), src, dst)


def gather(local: Tensor, src: TensorSpec) -> Tensor:
    """The whole value of a shard under ``src`` as a plain tensor on every rank of the placement;
    differentiable, the mirror image of ``spread``.

    ```
    forward    src ------> a             where src is B, a shares its storage
    backward   dual(src) <------ dL/da   every rank has the whole gradient, and keeps its part
    ```
    """
    with _HookOff():
        if tracks((local,)):
            return _apply(_Gather, local, src)
        if local.__class__ is Tensor and src is _everywhere(src):
            return local
        return _gather(local, src)


def _gather(local: Tensor, src: TensorSpec) -> Tensor:
    dst, x = _everywhere(src), torch.Tensor.detach(local)
    return x if src is dst else run(x, src, dst)


def land(local: Tensor, whole: Tensor, dst: TensorSpec) -> None:
    """Write ``whole``, which came from ``gather(local, dst)`` and was written to since, back into
    ``local``; differentiable.

    ```
    forward    a ------> dst, in place
    backward   dL/da <------ dual(dst)
    ```
    """
    with _HookOff():
        if tracks((local, whole)):
            _apply(_Land, local, whole, dst)
        else:
            _land(local, whole, dst)


def _land(local: Tensor, whole: Tensor, dst: TensorSpec) -> Tensor:
    src = _everywhere(dst)
    if src is not dst and my_coordinate(dst.placement) is not None:
        torch.Tensor.copy_(local, run(torch.Tensor.detach(whole), src, dst))
    return local


def _everywhere(spec: TensorSpec) -> TensorSpec:
    return spec.with_sbp((B,) * spec.placement.ndim)


def sum_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The sum over ``axes`` of the ranks' ``local``, of any shape. ``P -> B``, differentiable.

    ```
    forward    a        b        c       --->    a+b+c    a+b+c    a+b+c
    backward   x+y+z    x+y+z    x+y+z   <---      x        y        z
    ```
    """
    if my_coordinate(placement) is None:
        return local
    with _HookOff():
        if tracks((local,)):
            return _apply(_SumOver, local, placement, tuple(axes))
        return _reduce(local, placement, axes, "sum")


def max_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The elementwise largest of the ranks' ``local`` over ``axes``; not differentiable."""
    return local if my_coordinate(placement) is None else _reduce(local, placement, axes, "max")


def min_over(local: Tensor, placement: Placement, axes: Sequence[int]) -> Tensor:
    """The elementwise smallest of the ranks' ``local`` over ``axes``; not differentiable."""
    return local if my_coordinate(placement) is None else _reduce(local, placement, axes, "min")


def swap(x: Tensor, counts: Tensor, me: int, ranks: Sequence[int]) -> Tensor:
    """Rows change hands: ``counts[a, b]`` of those of ``ranks[a]``, in order, go to ``ranks[b]``;
    this is ``ranks[me]``. Differentiable.

    ```
    forward    a b | c      d | e f     --->    a b d      c e f        counts [2, 1], [1, 2]
    backward   rows go back the way they came
    ```

    A step that is recorded may have other counts in each run, if as many rows come to each rank.
    """
    with _HookOff():
        if tracks((x,)):
            return _apply(_Swap, x, counts, me, tuple(ranks))
        return _swapped(x, counts, me, tuple(ranks))


def _swapped(x: Tensor, counts: Tensor, me: int, ranks: tuple[int, ...]) -> Tensor:
    return current().as_one(_Rows(me, ranks), [torch.Tensor.detach(x), counts], ranks)[0]


@dataclass(frozen=True)
class _Rows:
    """(rows, counts) -> the rows that come."""

    me: int
    ranks: tuple[int, ...]

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, counts = xs
        going, coming = counts[self.me].tolist(), counts[:, self.me].tolist()
        pieces = [piece.contiguous() for piece in x.split(going)]
        shapes = [(n, *x.shape[1:]) for n in coming]
        return [torch.cat(current().all_to_all(pieces, shapes, self.ranks))]


class _Box(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        src: TensorSpec,
        dst: TensorSpec,
        grad_sbp: NdSbp | None,
        arrived: tuple[Tensor] | None,
    ) -> Tensor:
        ctx.route = src, dst, grad_sbp
        if arrived is not None:
            return arrived[0]
        with _HookOff():
            x = torch.Tensor.detach(local)
            # src to itself, wanted for its grad_sbp alone, returns x: an output must not be an
            # input's alias.
            return x.clone() if src is dst else run(x, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        src, dst, grad_sbp = ctx.route
        if grad_sbp is None:
            return box(grad, dst.dual, src.dual), None, None, None, None
        stop = dst.with_sbp(grad_sbp)
        return box(box(grad, dst.dual, stop), stop, src.dual), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        src, dst, _grad_sbp = ctx.route
        return tangent.clone() if src is dst else box(tangent, src, dst)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dst: TensorSpec, alias: bool) -> Tensor:
        ctx.dst = dst
        ctx.set_materialize_grads(False)
        return _spread(whole, dst, alias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        dst = ctx.dst
        if grad is None or my_coordinate(dst.placement) is None:
            return None, None, None
        return gather(grad, dst.dual), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return spread(tangent, ctx.dst)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, src: TensorSpec) -> Tensor:
        ctx.src = src
        ctx.set_materialize_grads(False)
        return _gather(local, src)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if grad is None else spread(grad, ctx.src.dual, alias=True)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return gather(tangent, ctx.src).clone()


# The class of the nodes that ``gather`` makes, whose ``src`` is the spec of what was gathered.
gathered_by: Any = _Gather._backward_cls  # type: ignore[attr-defined]


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, whole: Tensor, dst: TensorSpec) -> Tensor:
        ctx.dst = dst
        ctx.mark_dirty(local)
        return _land(local, whole, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, gather(grad, ctx.dst.dual), None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *__: None) -> Tensor:
        return box(tangent, _everywhere(ctx.dst), ctx.dst)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, me: int, ranks: tuple[int, ...]) -> Tensor:
        ctx.route = counts, me, ranks
        return _swapped(x, counts, me, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        counts, me, ranks = ctx.route
        return swap(grad, counts.T, me, ranks), None, None, None

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
            return current().all_reduce(x, tuple(placement.ranks.ravel().tolist()), op)
        at = my_coordinate(placement)
        assert at is not None
        for axis in wide:
            x = current().all_reduce(x, placement.axis_ranks(axis, at), op)
        return x


def _apply(function: Any, *args: Any) -> Any:
    """``function.apply``, bypassing the guard that keeps users' own autograd functions from global
    tensors."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "boxing: a torch.func transform (grad, vmap, jvp) is active.\n"
            "  It would see this rank's shard only, and boxing moves data between ranks.\n"
            "  Use torch.autograd.grad or backward on global tensors; in place of jvp, "
            "torch.autograd.functional.jvp or torch.autograd.forward_ad."
        )
    past_guard: Any = super(torch.autograd.Function, function)
    return past_guard.apply(*args)
