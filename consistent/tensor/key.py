"""What planning remembers a call by: its function, its specs, its static arguments, hashable.

The hot path (``csrc/bindings/dispatch/key.cpp``) makes a flat form of the same key; where this one
tells two calls apart, so must that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirrored.mirrored_tensor import MirroredTensor

from .shards import is_global


def key_of(func: Callable[..., Any], args: tuple, kwargs: dict) -> tuple:
    """The key of ``func(*args, **kwargs)``; floats count by their type."""
    named = (part for name, value in kwargs.items() for part in (name, static(value)))
    return (func, *map(static, args), *named)


def static(arg: Any) -> Any:
    """A hashable stand-in for an argument. Numbers that Python holds equal but torch treats apart
    (1, 1.0, True) get different ones."""
    if is_global(arg):
        return arg._spec
    kind = arg.__class__
    if kind is slice:
        return (slice, static(arg.start), static(arg.stop), static(arg.step))
    if kind is tuple or kind is list:
        return (kind, *map(static, arg))
    if kind is dict:
        return (dict, *((name, static(value)) for name, value in arg.items()))
    if kind is bool:
        return (bool, arg)
    if kind is float or kind is complex:
        return kind
    if kind is int or kind is str or arg is None:
        return arg
    if isinstance(arg, torch.Tensor):
        # A mirrored tensor is no plain one: planning refuses it.
        mirrored = kind is MirroredTensor
        return (
            MirroredTensor if mirrored else torch.Tensor, arg.shape, arg.dtype, arg.device.type,
        )  # fmt: skip
    try:
        hash(arg)
    except TypeError:
        return (kind, repr(arg))
    return (kind, arg)
