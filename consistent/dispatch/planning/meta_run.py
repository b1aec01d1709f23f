"""The outputs of an op without their values: it is run on ``meta`` tensors of the logical
shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...rules import table
from ...rules.signature import Call, Out
from ..plans.arguments import collect, fill
from ..plans.shards import HookOff

# Of the statistics that these give, torch's meta forms say other dtypes and sizes than the CPU's
# kernels: on the CPU only the op itself says them.
MISTOLD = frozenset(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update
    """.split()
)


def logical_outputs(
    run: Callable[..., Any], row: table.Row, call: Call
) -> tuple[tuple[Out, ...] | None, Any]:
    """(outputs, result): shapes and dtypes of the outputs, by running the op on meta tensors of the
    logical shapes, and the result of that run.

    The outputs are None where the op has no meta form, its shapes depend on data or it refuses the
    call; the result is then the error.
    """
    known = row.known_outs(call)
    if known is not None:
        return known, None
    made = on_meta(run, call)
    if isinstance(made, Exception):
        return None, made
    result, metas = made
    found: list[Any] = metas[:1] if call.inplace else []  # x[i] = v gives None
    if not call.inplace:
        collect((result,), found)
    return tuple(Out(t.shape, t.dtype) for t in found), result


def on_meta(run: Callable[..., Any], call: Call) -> tuple[Any, list[torch.Tensor]] | Exception:
    """What ``call`` gives on meta tensors, and these; the error where it has no meta form, asks for
    values or is refused."""
    metas = [torch.empty(o.shape, dtype=o.spec.dtype, device="meta") for o in call.operands]
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory")}
    try:
        with HookOff():  # no graph is made: these ask for no gradients
            return run(*fill(call.args, metas), **fill(kwargs, metas)), metas
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        return error.with_traceback(None)


def is_refusal(made: Any) -> bool:
    """Whether a run on meta tensors failed for what this call gives: sizes that do not fit, or a
    value that is asked for. Where the op has no meta form, all calls fail alike."""
    return isinstance(made, Exception) and not isinstance(made, NotImplementedError)


def has_meta_backward(run: Callable[..., Any], call: Call) -> bool:
    """Whether torch can differentiate ``call`` on meta tensors; True where no output requires
    grad."""
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
