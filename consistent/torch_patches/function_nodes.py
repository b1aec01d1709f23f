"""Changes of what an ``autograd.Function`` saves and gets in backward if tensors are global.

Autograd's engine passes raw shards to the node of a Function, but the user's code takes global or
whole tensors. The methods of torch below convert between them. If nothing is global, they do the
same as before; otherwise:

```
ctx.save_for_backward(x)    notes the spec of a global x, for torch may keep another object
ctx.saved_tensors           returns x as the global tensor that it was
backward(ctx, *grads)       gets gradients of global results whole, and returns raw ones
jvp(ctx, *tangents)         returns raw tangents in the same way
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, FunctionCtx

from ..dispatch.plans.shards import attach, compare_and_adopt, is_global, plain, rebox
from ..dispatch.running.user_code import UserCall, current_user_call, running_user_call
from ..movement.differentiable import gather
from ..movement.world import my_coordinate
from ..spec import TensorSpec

Specs = Sequence[TensorSpec | None]
_raw_saved: Any = torch._C._FunctionBase.__dict__["saved_tensors"]


def install() -> None:
    """Wrap the methods of torch by which an autograd Function saves tensors and runs backward."""
    _wrap(FunctionCtx, "save_for_backward", _save_for_backward)
    for name in ("apply", "apply_boxed"):
        if hasattr(BackwardCFunction, name):
            _wrap(BackwardCFunction, name, _run_backward)
    _wrap(BackwardCFunction, "apply_jvp", _run_jvp)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` of ``owner`` by ``around(original, self, *args)``."""
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(lambda self, *args: around(original, self, *args))
    setattr(owner, name, wrapped)


# -- what is saved ---------------------------------------------------------------------------------


def _save_for_backward(save: Callable[..., None], ctx: Any, *tensors: Any) -> None:
    """Implement ``ctx.save_for_backward``: save, and note the specs of global tensors."""
    save(ctx, *tensors)
    if any(map(is_global, tensors)):
        ctx._specs_of_saved = specs_of(tensors)
        type(ctx).saved_tensors = _saved_tensors  # changes the user's class only


def _get_saved(ctx: Any) -> tuple:
    """Implement ``ctx.saved_tensors``: return saved global tensors as global ones."""
    saved, specs = _raw_saved.__get__(ctx), ctx.__dict__.get("_specs_of_saved")
    if specs is None:
        return saved
    restored = (
        x if spec is None or is_global(x) else attach(x, spec)
        for x, spec in zip(saved, specs, strict=True)
    )
    return tuple(restored)


_saved_tensors = property(_get_saved)


def specs_of(values: Sequence[Any]) -> Specs:
    """Return the spec of each global tensor, and None for other values."""
    return tuple(x._spec if is_global(x) else None for x in values)


# -- backward --------------------------------------------------------------------------------------


@dataclass(slots=True)
class GlobalRecord:
    """Record, stored on an autograd node, of which of its results and inputs are global.

    ``record_globals`` makes it in forward, and backward of the node reads it.

    Attributes:
        results: output number -> spec of each global result.
        inputs: the specs of the node's inputs, if its code works on global tensors itself, as
            reentrant checkpoints do. None for user code, which gets gradients whole and plain.
        user_call: the call of user code in which the node was made, or None.
        times: how often the backward of the node has run.
    """

    results: dict[int, TensorSpec]
    inputs: Specs | None = None
    user_call: UserCall | None = None
    times: int = 0


def record_globals(out: Any, inputs: Specs | None = None) -> None:
    """Record, on the autograd node of a Function's result ``out``, which of its results are global.

    So backward knows how to convert their gradients. ``inputs`` are the specs of the Function's
    inputs, if its code works on global tensors itself.
    """
    outs: list[Any] = [
        x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)
    ]
    node = next((x.grad_fn for x in outs if isinstance(x.grad_fn, BackwardCFunction)), None)
    if node is None:
        return
    own_results = [x for x in outs if x.grad_fn is node and is_global(x)]
    results = {x.output_nr: x._spec for x in own_results}
    if inputs is None and forward_ad._current_level >= 0:
        _check_tangents(node, own_results)
    node._global_record = GlobalRecord(results, inputs, current_user_call())  # type: ignore[attr-defined]


def _run_backward(run: Callable[..., Any], node: Any, *grads: Any) -> Any:
    """Run ``backward`` of a Function's node, converting gradients on the way in and out.

    ``run`` is torch's method, and ``grads`` are raw shards.
    """
    record: GlobalRecord | None = getattr(node, "_global_record", None)
    if record is None:
        return _raw_grads(run(node, *grads), None)
    # apply_boxed passes all gradients in one list, whose items are replaced in place.
    boxed = grads[0] if len(grads) == 1 and isinstance(grads[0], list) else None
    converted = _grads_for_code(grads if boxed is None else boxed, record)
    if boxed is not None:
        boxed[:], converted = converted, (boxed,)
    user_call = record.user_call
    if user_call is None:
        return _raw_grads(run(node, *converted), record.inputs)
    record.times += 1
    with running_user_call(user_call, record.times):
        return _raw_grads(run(node, *converted), record.inputs)


def _grads_for_code(grads: Sequence[Any], record: GlobalRecord) -> tuple:
    """Convert gradients from shards to what the node's code takes: global tensors or whole ones."""
    specs = [record.results.get(i) for i in range(len(grads))]
    if record.inputs is not None:
        return as_global_grads(grads, specs)
    return tuple(
        g if g is None or spec is None else gather(plain(g), spec.dual.with_dtype(g.dtype))
        for g, spec in zip(grads, specs, strict=True)
    )


def _raw_grads(grads: Any, inputs: Specs | None) -> Any:
    """Convert the gradients that a Function's backward returned to those that torch's engine takes.

    ``inputs`` are the specs of the Function's inputs: the gradient of a global input becomes a
    shard. If it is None, the Function worked on whole tensors, and all gradients are whole.
    """
    if inputs is not None:
        return tuple(map(raw_input_grad, grads if isinstance(grads, tuple) else (grads,), inputs))
    if isinstance(grads, tuple):
        return tuple(map(gathered_grad, grads)) if any(map(is_global, grads)) else grads
    return gathered_grad(grads)


def gathered_grad(x: Any) -> Any:
    """Gather the gradient ``x`` to a plain tensor if it is global, else return it as it is.

    Returns None on a rank outside its placement.
    """
    if not is_global(x):
        return x
    if my_coordinate(x._spec.placement) is None:
        return None
    return gather(plain(x), x._spec)


def as_global_grads(grads: Sequence[Any], specs: Specs) -> tuple:
    """Return the shards ``grads`` of gradients as global tensors.

    ``specs`` are those of the tensors that they are gradients of, None for plain ones.
    """
    # view_as: attach changes the object itself, and the engine may use the raw one elsewhere.
    return tuple(
        g
        if g is None or spec is None or is_global(g)
        else attach(g.view_as(g), spec.dual.with_dtype(g.dtype))
        for g, spec in zip(grads, specs, strict=True)
    )


def raw_input_grad(grad: Any, spec: TensorSpec | None) -> Any:
    """Convert the gradient of an input of a Function to what torch's engine expects.

    It is the shard in the input's dual SBP if the input is global, with ``spec``, and the whole
    gradient if it is plain (None).
    """
    if grad is None:
        return None
    if spec is None:
        return gathered_grad(grad)
    global_grad = compare_and_adopt(grad, spec.placement, "backward")
    return plain(rebox(global_grad, spec.dual.with_dtype(global_grad.dtype), "backward"))


# -- forward mode ----------------------------------------------------------------------------------


def _run_jvp(run: Callable[..., Any], node: Any, *tangents: Any) -> Any:
    return _raw_grads(run(node, *tangents), None)


def _check_tangents(node: Any, global_results: Sequence[Any]) -> None:
    """Raise if forward-mode AD follows a result that is global and not B (replicated).

    torch has then taken the whole tangent that jvp returned for the tangent of the shard.
    """
    for x in global_results:
        if any(not e.is_broadcast for e in x._spec.sbp) and _has_tangent(x):
            raise RuntimeError(
                f"{node.name()}: forward returns a global tensor, {x._spec}, and forward-mode AD "
                "follows it.\n  The tangent that jvp returns is whole, and this rank has a part of "
                "the result.\n  Return it whole: y.to_global(sbp=B)."
            )


def _has_tangent(x: Any) -> bool:
    return forward_ad.unpack_dual(plain(x)).tangent is not None
