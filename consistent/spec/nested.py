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
    return map_instances(value, torch.Tensor, change)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in ``value``, in the order in which ``map_tensors`` visits them."""
    return instances_in(value, torch.Tensor)


def instances_in(value: Any, kind: type) -> list[Any]:
    """Return the instances of ``kind`` in nested containers, in the order of ``map_instances``."""
    instances: list[Any] = []

    def collect(x: Any) -> Any:
        instances.append(x)
        return x

    map_instances(value, kind, collect)
    return instances


def replace_instances(value: Any, kind: type, items: Iterable[Any]) -> Any:
    """Return ``value`` with its instances of ``kind`` replaced by ``items``, in order.

    It is the counterpart of ``instances_in``: take the tensors out of a call's arguments, change
    them, and put them back.
    """
    remaining = iter(items)
    return map_instances(value, kind, lambda _: next(remaining))


def map_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each instance of ``kind`` in it replaced by ``change(instance)``.

    It looks into lists, tuples, mappings, slices and dataclasses. A container in which nothing
    changes is returned itself, not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in _LEAVES:  # most values; the check against Mapping is slow
        return value
    if isinstance(value, Mapping):
        return _replace_items(
            value, {key: map_instances(x, kind, change) for key, x in value.items()}
        )
    if isinstance(value, list | tuple):
        new_items = [map_instances(x, kind, change) for x in value]
        if all(a is b for a, b in zip(new_items, value)):
            return value
        return type(value)(*new_items) if hasattr(value, "_fields") else type(value)(new_items)
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        new_items = [map_instances(x, kind, change) for x in ends]
        return value if all(a is b for a, b in zip(new_items, ends)) else slice(*new_items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | kind):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _replace_fields(
            value, {key: map_instances(x, kind, change) for key, x in fields.items()}
        )
    return value


def arguments_of(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) with which a model is called on a batch.

    A mapping gives keyword arguments, a tuple or list positional ones, and anything else, such as a
    tensor, is the one positional argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


def _replace_items(value: Any, items: dict[Any, Any]) -> Any:
    if all(items[key] is x for key, x in value.items()):
        return value
    if type(value) is dict:
        return items
    # Copied to keep the type and its state: a defaultdict, a model's output, a tokenizer's batch.
    result = copy.copy(value)
    for key, x in items.items():
        result[key] = x
    return result


def _replace_fields(value: Any, fields: dict[str, Any]) -> Any:
    if all(getattr(value, key) is x for key, x in fields.items()):
        return value
    result = copy.copy(value)
    for key, x in fields.items():
        object.__setattr__(result, key, x)  # also in frozen dataclasses
    return result
