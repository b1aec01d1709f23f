"""Traversal of the arguments of a call: collect the tensors in them, or replace them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...rules.signature import Operand

_Tensor = torch.Tensor


def collect(value: Any, into: list) -> None:
    """Append all tensors in ``value``, which may be nested, to the list ``into``, in order."""
    for item in value:
        if isinstance(item, _Tensor):
            into.append(item)
        elif isinstance(item, tuple | list):  # among them the named tuples that torch returns
            collect(item, into)
        elif isinstance(item, dict):
            collect(tuple(item.values()), into)


def tensors_of(args: tuple, kwargs: dict) -> list[Any]:
    """Return all tensors among the arguments of a call, nested ones included, in order."""
    tensors: list[Any] = []
    collect(args, tensors)
    if kwargs:
        collect(tuple(kwargs.values()), tensors)
    return tensors


def with_tensors(args: tuple, kwargs: dict, tensors: Sequence[Any]) -> tuple[tuple, dict]:
    """Return (args, kwargs) with their tensors replaced, in order, by ``tensors``.

    ``((x, [y]), {"dim": 0})`` becomes ``((a, [b]), {"dim": 0})`` for ``tensors`` a, b.
    """
    source = iter(tensors)
    # Tensors are replaced inline: most arguments are tensors, and a call for each would cost time.
    new_args = [
        next(source) if isinstance(a, _Tensor) else _replace_tensors(a, source) for a in args
    ]
    return tuple(new_args), _replace_tensors(kwargs, source) if kwargs else kwargs


def _replace_tensors(value: Any, source: Iterator[Any]) -> Any:
    if isinstance(value, _Tensor):
        return next(source)
    if isinstance(value, tuple) and value.__class__ is not torch.Size:
        return tuple([_replace_tensors(item, source) for item in value])
    if isinstance(value, list):
        return [_replace_tensors(item, source) for item in value]
    if isinstance(value, dict):
        return {name: _replace_tensors(item, source) for name, item in value.items()}
    return value


def fill(value: Any, tensors: Sequence[Any]) -> Any:
    """Return ``value``, arguments of a ``Call``, with each ``Operand`` replaced by its tensor.

    An ``Operand`` is the placeholder of a tensor in a plan; its ``index`` is that in ``tensors``.
    """
    if value.__class__ is Operand:
        return tensors[value.index]
    if value.__class__ is tuple:
        return tuple(fill(item, tensors) for item in value)
    if value.__class__ is list:
        return [fill(item, tensors) for item in value]
    if value.__class__ is dict:
        return {name: fill(item, tensors) for name, item in value.items()}
    return value
