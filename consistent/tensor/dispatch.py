"""One op on global tensors: choose -> box inputs -> run torch on the shards -> attach specs.

``torch_function`` is the hook. A call's *key* is the function, the interned specs of its tensors
and its static arguments; the key finds a *plan*, and the plan says all that is left to do:

    key -> plan    box these operands to those specs, put these sizes in, run func,
                   outputs get these specs

A key not met before is planned in Python (``planning``); what is more than one torch call is run by
``execute``. Float arguments are keyed by type only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirrored.mirrored_tensor import MirroredTensor

from . import shards
from .execute import execute
from .plan import observers, plans
from .planning import make_plan
from .shards import HookOff, moved_view_error, retype

_Tensor = torch.Tensor
_class: Any = None


def set_class(cls: Any) -> None:
    """Say what shards are retyped to. Kept here too, since a module's own global is the fastest
    to read."""
    global _class
    _class = cls
    shards.set_class(cls)


def torch_function(
    cls: Any, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    """The ``__torch_function__`` hook of GlobalTensor."""
    key: list[Any] = [func]
    add = key.append
    for arg in args:
        kind = arg.__class__
        if kind is _class:
            add(arg._spec)
        elif kind is float:
            add(float)
        elif kind is int or kind is str or arg is None:
            add(arg)
        else:
            add(_static(arg))
    if kwargs:
        for name, arg in kwargs.items():
            add(name)
            kind = arg.__class__
            if kind is _class:
                add(arg._spec)
            elif kind is float:
                add(float)
            elif kind is int or kind is str or arg is None:
                add(arg)
            else:
                add(_static(arg))
    plan = plans.get(tuple(key))
    if plan is None:
        plan = make_plan(func, args, kwargs or {}, tuple(key))
    if plan.fast and not observers:
        if plan.inplace and args[0]._moved_view:
            raise moved_view_error(plan.name)
        with HookOff():
            if plan.sizes is not None:
                out = plan.run(args[0], *plan.sizes)
            else:
                out = plan.run(*args, **kwargs) if kwargs else plan.run(*args)
        if out.__class__ is _Tensor:
            spec = plan.outs[0]
            if out.dtype is not spec.dtype:
                spec = spec.with_dtype(out.dtype)
            out.__class__ = _class
            out._spec = spec
            return out
        return out if plan.inplace else retype(out, plan.outs)
    return execute(plan, args, kwargs or {})


def _static(arg: Any) -> Any:
    """A hashable stand-in for an argument that is not a global tensor. Numbers that Python holds
    equal but torch treats apart (1, 1.0, True) get different ones."""
    kind = arg.__class__
    if kind is slice:
        return _static_slice(arg)
    if kind is tuple or kind is list:
        parts: list[Any] = [kind]
        for item in arg:
            of = item.__class__
            if of is int or of is str or item is None:
                parts.append(item)
            elif of is _class:
                parts.append(item._spec)
            elif of is slice:
                parts.append(_static_slice(item))
            else:
                parts.append(_static(item))
        return tuple(parts)
    if kind is bool:
        return (bool, arg)
    if kind is float or kind is complex or arg is None:
        return kind
    if kind is int or kind is str:
        return arg
    if kind is _class:
        return arg._spec
    if isinstance(arg, _Tensor):
        # A mirrored tensor is no plain one: planning refuses it.
        return (
            MirroredTensor if kind is MirroredTensor else _Tensor,
            arg.shape,
            arg.dtype,
            arg.device.type,
        )
    if kind is dict:
        return (dict, *((name, _static(value)) for name, value in arg.items()))
    try:
        hash(arg)
    except TypeError:
        return (kind, repr(arg))
    return (kind, arg)


def _static_slice(arg: slice) -> tuple:
    start, stop, step = arg.start, arg.stop, arg.step
    if (
        (start is None or start.__class__ is int)
        and (stop is None or stop.__class__ is int)
        and (step is None or step.__class__ is int)
    ):
        return (slice, start, stop, step)
    return (slice, _static(start), _static(stop), _static(step))
