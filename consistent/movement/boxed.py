"""Boxing (redistribution) of shards as a differentiable operation.

```
forward     srcs ------> dsts               those that can be in one message
backward    duals of srcs <------ duals of dsts
```

Each shard is boxed along its route, (source spec, target spec). The backward of boxing is boxing,
so it is built from itself and can be differentiated any number of times. Shards may be of a Tensor
subclass whose ``shape`` is the logical one; results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..spec import NdSbp, TensorSpec
from .coded import Coders, gather_each, start_reduces
from .grad_mode import HookOff, apply, is_accumulated, tracks
from .run import run
from .several import Route, run_several

# (autograd nodes that the gradients go to, gradients, their specs) -> the gradients that are still
# to be boxed; None for each that the callback has taken over.
Arriving = Callable[..., Sequence[Tensor | None]]


def box(
    local: Tensor,
    src: TensorSpec,
    dst: TensorSpec,
    grad_sbp: NdSbp | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Return this rank's shard under ``dst``, from its shard under ``src``; differentiable.

    In backward the gradient is boxed from ``dst.dual`` to ``src.dual``.

    Args:
        local: this rank's shard under ``src``.
        src: spec of the tensor.
        dst: spec to box to. If it is ``src`` and there is no ``grad_sbp``, ``local`` is returned.
        grad_sbp: SBPs to which the gradient is boxed in between, on the placement of ``dst``. So a
            program decides where in backward a reduction happens.
        arrived: the result, if it was made in advance, as by a prefetch; then nothing is sent.

    Raises:
        ValueError: ``src`` or ``dst`` is P(max) or P(min), and ``local`` needs a gradient.
    """
    if src is dst and grad_sbp is None:
        return local
    with HookOff():
        if tracks((local,)) and not _has_no_derivative(local, src, dst):
            results = None if arrived is None else (arrived,)
            return apply(_Box, _single_box_call(src, dst, grad_sbp), results, local)[0]
        return run(torch.Tensor.detach(local), src, dst) if arrived is None else arrived


def box_several(
    locals_: Sequence[Tensor],
    routes: Sequence[Route],
    arrived: Sequence[Tensor] | None = None,
    arriving: Arriving | None = None,
    coders: Coders = (),
) -> list[Tensor]:
    """Box several shards, as ``box`` does with each, in as few messages as possible.

    Args:
        locals_: this rank's shards.
        routes: (src, dst) of each, which differ.
        arrived: the results, if they were made in advance, as by a prefetch.
        arriving: called in backward with the gradients before they are boxed; it returns those that
            are left to be boxed. Not called if backward is itself differentiated.
        coders: for each shard the codecs that compress it in a gather, and its gradient in
            backward, or None. Only gradients that are added to a ``.grad`` are sent by codecs.
            Those that ``torch.autograd.grad`` returns, or that are themselves differentiated, are
            sent in full.
    """
    if forward_ad._current_level >= 0:
        # Torch's jvp needs tangents of all outputs or of none, and outputs must not share memory.
        results = arrived or [None] * len(routes)
        return [
            box(x, *route, None, y) for x, route, y in zip(locals_, routes, results, strict=True)
        ]
    run_each = partial(gather_each, coders=coders) if any(coders) else run_several
    with HookOff():
        if tracks(locals_):
            grad_routes = tuple((dst.dual, src.dual) for src, dst in routes)
            call = _BoxCall(routes, grad_routes, run_each, coders, arriving)
            return list(apply(_Box, call, None if arrived is None else (*arrived,), *locals_))
        return list(run_each(locals_, routes) if arrived is None else arrived)


class _BoxCall(NamedTuple):
    """How ``_Box`` boxes its inputs in forward, and their gradients in backward."""

    routes: Sequence[Route]
    # One route per gradient; if `is_single`, routes taken one after the other.
    grad_routes: Sequence[Route]
    run: Callable[[Sequence[Tensor], Sequence[Route]], Sequence[Tensor]]  # without autograd
    coders: Coders = ()
    arriving: Arriving | None = None
    is_single: bool = False


@lru_cache(maxsize=1 << 11)
def _single_box_call(src: TensorSpec, dst: TensorSpec, grad_sbp: NdSbp | None) -> _BoxCall:
    """Return how to box one shard from ``src`` to ``dst``, and its gradient via ``grad_sbp``."""
    stops = [dst.dual, *([] if grad_sbp is None else [dst.with_sbp(grad_sbp)]), src.dual]
    return _BoxCall(((src, dst),), tuple(pairwise(stops)), _run_single, is_single=True)


def _run_single(locals_: Sequence[Tensor], routes: Sequence[Route]) -> tuple[Tensor]:
    (src, dst), x = routes[0], torch.Tensor.detach(locals_[0])
    # src to itself, called only for grad_sbp: the output of a Function must not alias its input.
    return (x.clone() if src is dst else run(x, src, dst),)


def _has_no_derivative(local: Tensor, src: TensorSpec, dst: TensorSpec) -> bool:
    """Return whether ``src`` or ``dst`` is P(max) or P(min), which have no derivative.

    Raises:
        ValueError: one of them is, and ``local`` requires grad.
    """
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


class _Box(torch.autograd.Function):
    """Autograd Function that boxes shards and, in backward, their gradients by a ``_BoxCall``."""

    @staticmethod
    def forward(
        ctx: Any, call: _BoxCall, arrived: tuple[Tensor, ...] | None, *locals_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        results = tuple(call.run(locals_, call.routes)) if arrived is None else arrived
        if not call.is_single:
            # Some outputs may get no gradient, which is then so on all ranks, and None is not
            # boxed. The gradient of a single shard is boxed even if zero, since other ranks may
            # wait for it.
            ctx.set_materialize_grads(False)
            frozen = [
                x for x, local in zip(results, locals_, strict=True) if not local.requires_grad
            ]
            ctx.mark_non_differentiable(*frozen)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _BoxCall = ctx.call
        if call.is_single:
            x: Any = grads[0]
            for route in call.grad_routes:
                x = box(x, *route)
            return None, None, x
        return None, None, *_box_gradients(ctx, call, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor]:
        # As in forward, the result must not be an alias of the input.
        ((src, dst),), tangent = ctx.call.routes, tangents[-1]
        return (tangent.clone() if src is dst else box(tangent, src, dst),)


def _box_gradients(ctx: Any, call: _BoxCall, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Box the gradients of ``_Box``'s outputs; return those of its inputs, None where not needed.

    Gradients that the callback ``call.arriving`` takes over are not boxed.
    """
    coders, remaining = _coders_of(ctx), grads
    if call.arriving is not None and not torch.is_grad_enabled():
        nodes = [node for node, _ in ctx.next_functions]
        remaining = call.arriving(
            nodes, grads, [spec for spec, _ in call.grad_routes], coders=coders
        )
    needed = ctx.needs_input_grad[-len(grads) :]
    to_box = {i: x for i, x in enumerate(remaining) if x is not None and needed[i]}
    xs, routes = list(to_box.values()), [call.grad_routes[i] for i in to_box]
    if coders:
        boxed = start_reduces(xs, routes, [coders[i] for i in to_box]).wait()
    else:
        boxed = box_several(xs, routes)
    boxed_by_index = dict(zip(to_box, boxed, strict=True))
    return [boxed_by_index.get(i) for i in range(len(grads))]


def _coders_of(ctx: Any) -> Coders:
    """Return for each gradient of this backward the coder that sends it, or None; () without any.

    ``ctx`` is that of ``_Box``. Only gradients that are added to a ``.grad`` have a coder.
    """
    if torch.is_grad_enabled() or not any(ctx.call.coders):
        return ()
    return [
        coder if node is not None and is_accumulated(node) else None
        for (node, _), coder in zip(ctx.next_functions, ctx.call.coders, strict=True)
    ]
