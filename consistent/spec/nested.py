"""Traversal of tensors in nested values: lists, tuples, dicts, model outputs, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

_LEAVES = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with each tensor in it replaced by ``change(tensor)``.

    A container in which nothing changes is returned itself, not copied.
    """
    return map_each(value, torch.Tensor, change)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in ``value``, in the order in which ``map_tensors`` visits them."""
    return each_in(value, torch.Tensor)


def each_in(value: Any, kind: type) -> list[Any]:
    """Return the instances of ``kind`` in nested containers, in the order of ``map_each``."""
    found: list[Any] = []

    def look(x: Any) -> Any:
        found.append(x)
        return x

    map_each(value, kind, look)
    return found


def replace_each(value: Any, kind: type, items: Iterable[Any]) -> Any:
    """Return ``value`` with its instances of ``kind`` replaced by ``items``, in order.

    It is the counterpart of ``each_in``: take the tensors out of a call's arguments, change them,
    and put them back.
    """
    left = iter(items)
    return map_each(value, kind, lambda _: next(left))


def map_each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each instance of ``kind`` in it replaced by ``change(instance)``.

    It looks into lists, tuples, mappings, slices and dataclasses. A container in which nothing
    changes is returned itself, not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in _LEAVES:  # most values; the check against Mapping is slow
        return value
    if isinstance(value, Mapping):
        return _mapping(value, {key: map_each(x, kind, change) for key, x in value.items()})
    if isinstance(value, list | tuple):
        made = [map_each(x, kind, change) for x in value]
        if all(a is b for a, b in zip(made, value)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        made = [map_each(x, kind, change) for x in ends]
        return value if all(a is b for a, b in zip(made, ends)) else slice(*made)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | kind):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _fields(value, {key: map_each(x, kind, change) for key, x in fields.items()})
    return value


def arguments_of(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) with which a model is called on a batch.

    A mapping gives keyword arguments, a tuple or list positional ones, and anything else, such as a
    tensor, is the one positional argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


def _mapping(value: Any, made: dict[Any, Any]) -> Any:
    if all(made[key] is x for key, x in value.items()):
        return value
    if type(value) is dict:
        return made
    # Copied to keep the type and its state: a defaultdict, a model's output, a tokenizer's batch.
    found = copy.copy(value)
    for key, x in made.items():
        found[key] = x
    return found


def _fields(value: Any, made: dict[str, Any]) -> Any:
    if all(getattr(value, key) is x for key, x in made.items()):
        return value
    found = copy.copy(value)
    for key, x in made.items():
        object.__setattr__(found, key, x)  # also in frozen dataclasses
    return found
