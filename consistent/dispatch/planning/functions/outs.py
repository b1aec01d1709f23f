"""Calls with ``out=t``: a run on ``meta`` tensors shows whether and how torch writes into ``t``.

```
dtypes that the op gives without out=    the op, boxed to the layout of t and written into it
other dtypes                             torch's own function on whole tensors: sum computes in the
                                         dtype of t, add in that of its operands, argmax refuses
refused, or t would be resized           raises
a tensor requires grad                   raises if torch does
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrored.transports.default import current

from ....movement.grad_mode import records
from ...plans.arguments import collect, tensors_of, with_tensors
from ...plans.shards import common_placement, is_global
from ...running.whole_call import call_whole
from ..without_modes import without_modes

_Run = Callable[..., Any]


def into_out(
    name: str, run: _Run, names: Sequence[str], args: tuple, kwargs: dict
) -> Callable[..., Any]:
    """Return the implementation of an op for calls that pass ``out=`` or the like.

    Args:
        name: the op's name, for messages.
        run: torch's function for the op.
        names: names of the parameters that receive results, such as ``("out",)``.
        args: positional arguments of the call.
        kwargs: named arguments of the call.

    Raises:
        RuntimeError: torch does not write this op's result into the tensors passed as ``out``.
    """
    call = _choose_implementation(name, run, names, args, kwargs)

    def call_untracked(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of(args, kwargs)
        # Checked in each call, since calls with one plan may differ in whether they record a graph.
        if records(tensors):
            _refuse_gradients(name, run, args, kwargs, tensors)
        return call(*args, **kwargs)

    return call_untracked


def _choose_implementation(
    name: str, run: _Run, names: Sequence[str], args: tuple, kwargs: dict
) -> Callable[..., Any]:
    """Choose how a call with ``out=`` runs: see the table at the top of this file.

    Takes the arguments of ``into_out`` and returns a function of the call's arguments.
    """
    # Calling the packet of an overload selects the overload without out=.
    functional = run._overloadpacket if isinstance(run, torch._ops.OpOverload) else run
    rest = {key: value for key, value in kwargs.items() if key not in names}
    outs = _out_tensors(names, kwargs)
    without_out, with_out = _on_meta(functional, args, rest), _on_meta(run, args, kwargs)

    def whole(*args: Any, **kwargs: Any) -> Any:
        # No positional argument has position len(args), so `out` is looked up by name.
        return call_whole(name, run, args, kwargs, [(len(args), key) for key in names])

    if isinstance(with_out, Exception):
        if isinstance(without_out, Exception) or _has_no_meta_form(with_out):
            # An error that the op raises when it runs would be raised on the ranks of its placement
            # only, so fall back to the op only if these are all ranks.
            covers_world = common_placement(name, tensors_of(args, kwargs)).size == current().size
            return _copy_into_out(functional, names, whole if covers_world else None)
        raise RuntimeError(
            f"{name}: out is {_describe(outs)}, and torch does not write "
            f"{_describe(_tensors_in(without_out))} into it: {with_out}\n  "
            "Give an out of the result's dtype, or omit out=."
        ) from with_out
    if not isinstance(without_out, Exception):
        if [x.dtype for x in _tensors_in(without_out)] == [x.dtype for x in outs]:
            return _copy_into_out(functional, names)
    # Compare with the returned tensors, not with `out`: linalg_matrix_rank resizes its out on meta
    # tensors, though not on others.
    for target, result in zip(outs, _tensors_in(with_out), strict=True):
        _refuse_resized(target, result)
    return whole


def _on_meta(run: _Run, args: tuple, kwargs: dict, tracked: bool = False) -> Any:
    """Run the call on meta tensors and return its result, or the error that it raises.

    With ``tracked`` the meta tensors require grad where the arguments do.
    """
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    metas = []
    with without_modes():
        for x in tensors_of(args, kwargs):
            meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
            metas.append(meta.requires_grad_(tracked and x.requires_grad))
        positional, named = with_tensors(args, kwargs, metas)
        try:
            return run(*positional, **named)
        except Exception as error:  # noqa: BLE001  (meta kernels raise errors of many kinds)
            # The traceback would keep the frames alive, and the tensors in them.
            return error.with_traceback(None)


def _has_no_meta_form(error: Exception) -> bool:
    """Return whether ``error``, from a call on meta tensors, says that a meta kernel is missing.

    Some meta kernels are written in Python and take no ``out``; their errors count too.
    """
    message = str(error).removeprefix("torch._meta_registrations.")
    return isinstance(error, NotImplementedError) or message.startswith("meta_")


def _out_tensors(names: Sequence[str], kwargs: dict) -> list[Any]:
    tensors: list[Any] = []
    collect([kwargs.get(name) for name in names], tensors)
    return tensors


def _tensors_in(result: Any) -> list[Any]:
    tensors: list[Any] = []
    collect((result,), tensors)
    return tensors


def _describe(tensors: Sequence[Any]) -> str:
    descriptions = [
        str(x._spec) if is_global(x) else f"{tuple(x.shape)} {x.dtype}" for x in tensors
    ]
    return " and ".join(descriptions)


def _refuse_gradients(name: str, run: _Run, args: tuple, kwargs: dict, tensors: list) -> None:
    """Raise if torch refuses to write into ``out=`` because a tensor of the call requires grad.

    Whether torch refuses is found by running the call on meta tensors that require grad. For ops
    without a derivative torch does not refuse. ``tensors`` are the tensors of the call.
    """
    error = _on_meta(run, args, kwargs, tracked=True)
    if isinstance(error, RuntimeError) and "automatic differentiation" in str(error):
        tensor = next(x for x in tensors if x.requires_grad)
        raise RuntimeError(
            f"{name}: x is {_describe([tensor])} and requires grad, and what is written into out= "
            "has no history. Omit out=, or call it under torch.no_grad()."
        )


def _copy_into_out(
    run: _Run, names: Sequence[str], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that runs the op without ``out=`` and copies its result into ``out``.

    The copy boxes the result to the layout of ``out``. If their dtypes differ, ``otherwise`` is
    called instead; if it is None, the function raises.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        rest = {key: value for key, value in kwargs.items() if key not in names}
        result = run(*args, **rest)
        outs = [kwargs[name] for name in names if kwargs.get(name) is not None]
        out = outs[0] if len(outs) == 1 else tuple(outs)
        targets = out if isinstance(out, tuple | list) else (out,)
        results = result if isinstance(result, tuple | list) else (result,)
        pairs = tuple(zip(targets, results, strict=True))
        if otherwise is not None and any(x.dtype is not y.dtype for x, y in pairs):
            return otherwise(*args, **kwargs)
        for target, value in pairs:
            _copy_to_target(target, value)
        return out

    return call


def _copy_to_target(target: Any, value: Any) -> None:
    """Copy ``value``, a result of the op, into ``target``; both must agree in shape and dtype."""
    _refuse_resized(target, value)
    if target.dtype is not value.dtype:
        raise RuntimeError(
            f"out=: the result is {value.dtype} and out is {target.dtype}. Give an out of the "
            "result's dtype, or omit out=."
        )
    target.copy_(value)


def _refuse_resized(target: Any, value: Any) -> None:
    if target.shape != value.shape:
        raise RuntimeError(
            f"out=: the result has shape {tuple(value.shape)} and out has {tuple(target.shape)}, "
            "and a global tensor is not resized. Give an out of the result's shape, or omit out=."
        )
