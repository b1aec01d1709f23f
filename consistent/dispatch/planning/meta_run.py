"""Shapes and dtypes of an op's outputs, from a run on ``meta`` tensors of the logical shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...rules import table
from ...rules.signature import Call, Out
from ..plans.arguments import collect, fill
from ..plans.shards import HookOff
from .meta_answers import cached_facts

# Ops whose meta kernels report other dtypes and sizes for the returned statistics than the CPU
# kernels do. On the CPU only a run of the op itself shows them.
WRONG_META_KERNELS = frozenset(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update
    """.split()
)


def logical_outputs(
    run: Callable[..., Any], row: table.Row, call: Call
) -> tuple[tuple[Out, ...] | None, Any]:
    """Return the shapes and dtypes of an op's outputs, from the rule or a run on meta tensors.

    The meta tensors have the logical shapes of the operands.

    Returns:
        (outputs, result of the run). If the outputs are known from the rule or an earlier run,
            nothing is run and the result is None. The outputs are None if the op has no meta
            kernel, if its output shapes depend on data or if it refuses the call; the result is
            then the error. They are empty if the op returns no tensor.
    """
    known_outs = row.known_outs(call)
    if known_outs is not None:
        return known_outs, None
    cached = cached_facts(run, call)
    if "outs" in cached:
        return cached["outs"], None
    meta_run = run_on_meta(run, call)
    if isinstance(meta_run, Exception):
        return None, meta_run
    result, metas = meta_run
    tensors: list[Any] = metas[:1] if call.inplace else []  # not the result: x[i] = v returns None
    if not call.inplace:
        collect((result,), tensors)
    outs = tuple(Out(t.shape, t.dtype) for t in tensors)
    if outs:  # a query has none; its result is the answer
        cached["outs"] = outs
    return outs, result


def run_on_meta(run: Callable[..., Any], call: Call) -> tuple[Any, list[torch.Tensor]] | Exception:
    """Run ``call`` on meta tensors; return (result, meta tensors), or the error that it raises.

    The run raises if the op has no meta kernel, needs values, or refuses the call.
    """
    metas = [torch.empty(o.shape, dtype=o.spec.dtype, device="meta") for o in call.operands]
    # With these arguments the op would make its result on a real device.
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory")}
    try:
        with HookOff():  # no autograd graph is made: none of the meta tensors requires grad
            return run(*fill(call.args, metas), **fill(kwargs, metas)), metas
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        # The traceback would keep the frames alive, and the tensors in them.
        return error.with_traceback(None)


def is_refusal(meta_run: Any) -> bool:
    """Return whether a run on meta tensors failed because of the sizes or values of this call.

    ``meta_run`` is what ``run_on_meta`` returned. The planner does not cache a plan made after such
    a failure, because a call of other sizes may succeed. An op without a meta kernel fails for all
    calls, which does not count.
    """
    return isinstance(meta_run, Exception) and not isinstance(meta_run, NotImplementedError)


def has_meta_backward(run: Callable[..., Any], call: Call) -> bool:
    """Return whether torch can run the backward of ``call`` on meta tensors.

    Ranks outside the placement follow a training step on meta tensors, and use this to see if
    autograd will work for them. It is also True if no output requires grad or if the op refuses the
    call.
    """
    cached = cached_facts(run, call)
    if "backward" not in cached:
        cached["backward"] = _has_meta_backward(run, call)
    return cached["backward"]


def _has_meta_backward(run: Callable[..., Any], call: Call) -> bool:
    metas = [torch.empty(o.shape, dtype=o.spec.dtype, device="meta") for o in call.operands]
    leaves = [x.requires_grad_() for x in metas if x.dtype.is_floating_point or x.dtype.is_complex]
    tensors: list[Any] = []
    with HookOff(), torch.enable_grad():
        try:
            # Copies, because an in-place op may not write into leaves that require grad.
            copies = [x.clone() for x in metas]
            result = run(*fill(call.args, copies), **fill(call.kwargs, copies))
            collect((result, copies[:1]), tensors)
        except Exception:  # noqa: BLE001  (what the op itself refuses shows when it runs)
            return True
        outs = [x for x in tensors if x.requires_grad and x.grad_fn is not None]
        try:
            torch.autograd.grad(
                outs, leaves, [torch.empty_like(x) for x in outs], allow_unused=True
            )
        except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
            return not outs
    return True
