"""What an op gives, without its values: by running it on ``meta`` tensors of the logical shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..rules import table
from ..rules.signature import Call, Out
from .arguments import collect, fill
from .plan import MAX_PLANS, dtypes
from .shards import HookOff


def logical_outputs(
    run: Callable[..., Any], row: table.Row, call: Call, level: tuple
) -> tuple[tuple[Out, ...] | None, Any]:
    """Shapes and dtypes of the outputs, by running the op on meta tensors of the logical shapes.

    Where the rule says the shapes itself, the dtypes of an earlier call that differed in sizes only
    are used again. None where the op has no meta form or its shapes depend on data.
    """
    told = row.told_outs(call)
    if told is not None:
        return told, None
    known = dtypes.get(level)
    if known is not None:
        shapes = row.out_shapes(call)
        if shapes is not None and len(shapes) == len(known):
            return tuple(Out(torch.Size(s), d) for s, d in zip(shapes, known, strict=True)), None
    made = on_meta(run, call)
    if made is None:
        return None, None
    result, metas = made
    found: list[Any] = metas[:1] if call.inplace else []  # x[i] = v gives None
    if not call.inplace:
        collect((result,), found)
    if found or result is None:
        if len(dtypes) >= MAX_PLANS:
            dtypes.clear()
        dtypes[level] = tuple(t.dtype for t in found)
        return tuple(Out(t.shape, t.dtype) for t in found), result
    return (), result


def on_meta(run: Callable[..., Any], call: Call) -> tuple[Any, list[torch.Tensor]] | None:
    """What ``call`` gives on meta tensors, and these; None where it has no meta form or asks for
    values."""
    metas = [torch.empty(o.shape, dtype=o.spec.dtype, device="meta") for o in call.operands]
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory")}
    try:
        with HookOff():  # no graph is made: these ask for no gradients
            return run(*fill(call.args, metas), **fill(kwargs, metas)), metas
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None


def has_meta_backward(run: Callable[..., Any], call: Call) -> bool:
    """Whether torch can differentiate ``call`` on meta tensors; True where it does not at all."""
    metas = [torch.empty(o.shape, dtype=o.spec.dtype, device="meta") for o in call.operands]
    leaves = [x.requires_grad_() for x in metas if x.dtype.is_floating_point or x.dtype.is_complex]
    found: list[Any] = []
    with HookOff(), torch.enable_grad():
        try:
            # Copies, so that ops may write into them.
            copies = [x.clone() for x in metas]
            result = run(*fill(call.args, copies), **fill(call.kwargs, copies))
            collect((result, copies[:1]), found)
        except Exception:  # noqa: BLE001  (what the op itself refuses shows when it runs)
            return True
        outs = [x for x in found if x.requires_grad and x.grad_fn is not None]
        try:
            torch.autograd.grad(
                outs, leaves, [torch.empty_like(x) for x in outs], allow_unused=True
            )
        except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
            return not outs
    return True
