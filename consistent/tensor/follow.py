"""What ranks outside a placement do where others run an op: they keep its shapes and its graph.

Mostly they run it too, on ``meta`` tensors. Three kinds of ops need more:

* what comes out is known only by doing it (``nonzero``, ``x[mask]``, ``unique``, ``equal``): the
  first rank of the placement tells all;
* torch has no form of it for ``meta`` tensors, and the rule says the shapes (``ctc_loss``): they
  stand in for the result;
* the backward of torch's op asks for values (``x[mask] = v``, ``index_fill``): a node that passes
  gradients of the right shapes stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrored import comm

from .plan import Plan
from .shards import plain


@dataclass(frozen=True, slots=True)
class Known:
    """What there is to know of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def perform(plan: Plan, run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
    """``run()``, or what this rank does in its place; ``tensors`` are the op's operands."""
    if plan.told and not plan.inplace:
        return _do_or_be_told(plan, run, tensors)
    if not plan.outside:
        return run()
    if plan.said:
        return _stand_in(_as_said(plan), tensors)
    if not (plan.told or (plan.stand_in and _tracked(tensors))):
        # Torch saves what an op returns for its backward, and meta kernels written in Python would
        # read the logical shape of a global tensor.
        return _map(run(), torch.Tensor, plain)
    if plan.inplace:
        target = tensors[0]
        wanted = Known(tuple(target.shape), target.dtype, _tracked(tensors))
        (written,) = _stand_in((wanted,), tensors)
        return torch.Tensor.copy_(target, written)
    with torch.no_grad():
        out = run()
    return _stand_in(_map(out, torch.Tensor, lambda x: _known(x, _is_continuous(x))), tensors)


def _as_said(plan: Plan) -> Any:
    """What the rule says of the outputs, put together like torch's result."""
    outs = [
        Known(spec.local_shape(None), spec.dtype, tracked and spec.dtype.is_floating_point)
        for spec, tracked in zip(plan.outs, plan.said, strict=True)
    ]
    named = getattr(torch.return_types, plan.name, tuple)
    return outs[0] if len(outs) == 1 else named(outs)


def _do_or_be_told(plan: Plan, run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
    """A collective of all ranks of the world."""
    transport, first = comm.current(), plan.placement.first_rank
    out = None if plan.outside else run()
    told = None
    if transport.rank == first:
        told = _map(out, torch.Tensor, lambda x: _known(x, x.requires_grad))
    told = transport.gather_objects(told, tuple(range(transport.size)))[first]
    return _stand_in(told, tensors) if plan.outside else out


def _stand_in(told: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """``told`` with ``meta`` tensors for what is Known, in the graph made of ``tensors``."""
    shapes: list[Known] = []
    _map(told, Known, shapes.append)
    made = iter(_StandIn.apply(tuple(shapes), *map(plain, tensors)) if shapes else ())
    return _map(told, Known, lambda _: next(made))


class _StandIn(torch.autograd.Function):
    """The node that this rank has where the ranks of the placement have the op's own."""

    @staticmethod
    def forward(ctx: Any, shapes: tuple[Known, ...], *tensors: torch.Tensor) -> tuple:
        ctx.inputs = tuple(_known(x, _is_continuous(x)) for x in tensors)
        made = tuple(torch.empty(k.shape, dtype=k.dtype, device="meta") for k in shapes)
        fixed = (x for x, k in zip(made, shapes, strict=True) if not k.requires_grad)
        ctx.mark_non_differentiable(*fixed)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        made = _StandIn.apply(ctx.inputs, *(x for x in grads if x is not None))
        needed = ctx.needs_input_grad[1:]
        return None, *(x if wanted else None for x, wanted in zip(made, needed, strict=True))


def _known(x: torch.Tensor, requires_grad: bool) -> Known:
    return Known(tuple(x.shape), x.dtype, requires_grad)


def _is_continuous(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _tracked(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with each ``kind`` inside it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([_map(item, kind, change) for item in value])
    return value
