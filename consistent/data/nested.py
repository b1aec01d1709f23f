"""Traverse batches: tensors in mappings, lists, tuples, dataclasses and objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

Path = tuple[Any, ...]  # keys, positions and names of attributes that lead to a value


Stop = Callable[[Path, Any], bool]


class Attribute(str):
    """Name of an attribute in a path to a value, as opposed to a key of a mapping.

    ``("x", Attribute("ids"))`` is the path of ``batch["x"].ids``.
    """


def traverse_all(path: Path, x: Any) -> bool:
    """Return False: the default of ``stop``, by which every container is traversed."""
    return False


def tensors(batch: Any) -> Iterator[tuple[Path, Tensor]]:
    """Return (path, tensor) of each tensor in a batch."""
    return ((path, x) for path, x in leaves(batch) if isinstance(x, Tensor))


def leaves(batch: Any, stop: Stop = traverse_all) -> Iterator[tuple[Path, Any]]:
    """Return (path, value) of each value in a batch that contains no other values.

    ``{"x": [1, 2]}`` gives ``(("x", 0), 1)`` and ``(("x", 1), 2)``. A container for which
    ``stop(path, container)`` is true is not traversed, but returned as one value.
    """

    def walk(x: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
        # An object inside itself is not traversed again.
        values = None if stop(path, x) or id(x) in above else children(x)
        if values is None:
            yield path, x
        for key, value in (values or {}).items():
            yield from walk(value, (*path, key), (*above, id(x)))

    return walk(batch, (), ())


def map_leaves(fn: Callable[[Path, Any], Any], batch: Any, stop: Stop = traverse_all) -> Any:
    """Return a copy of the batch with ``fn(path, value)`` in place of each value of ``leaves``.

    Containers keep their types where possible. An object whose attributes do not change is not
    copied.
    """

    def walk(x: Any, path: Path, above: tuple[int, ...]) -> Any:
        values = None if stop(path, x) or id(x) in above else children(x)
        if values is None:
            return fn(path, x)
        new_values = {
            key: walk(each, (*path, key), (*above, id(x))) for key, each in values.items()
        }
        return _rebuild(x, values, new_values)

    return walk(batch, (), ())


def children(x: Any) -> dict[Any, Any] | None:
    """Return the values in ``x`` by key, position or attribute name; None if it is no container.

    Containers are mappings, lists and tuples, and objects with an attribute that is a tensor, an
    array, a dataclass or one of these.
    """
    if isinstance(x, Tensor | np.ndarray | str | bytes | int | float | None):
        return None
    if isinstance(x, Mapping):
        return {**dict(x), **_extra_attributes(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    members = attributes(x)
    return members if any(_is_batch_value(value) for value in members.values()) else None


def attributes(x: Any) -> dict[Attribute, Any]:
    """Return the attributes of an object by name, including slots and fields of a dataclass.

    There are none for classes, callables (such as modules) and objects of built-in types.
    """
    if isinstance(x, type) or callable(x) or type(x).__module__ == "builtins":
        return {}
    names = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else []
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    names += list(getattr(x, "__dict__", ()))
    return {
        Attribute(name): getattr(x, name)
        for name in dict.fromkeys(names)
        if name not in ("__dict__", "__weakref__") and hasattr(x, name)
    }


def _is_batch_value(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | list | tuple | Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _extra_attributes(x: Mapping) -> dict[Attribute, Any]:
    """Return the lists, tuples and tensors that a mapping has as attributes, next to its items.

    For example the encodings of transformers' ``BatchEncoding``. A plain dict has none.
    """
    instance_dict = getattr(x, "__dict__", {})
    return {
        Attribute(name): value
        for name, value in instance_dict.items()
        if isinstance(value, Tensor | np.ndarray | list | tuple) and name not in x
    }


def _rebuild(x: Any, old_values: dict[Any, Any], new_values: dict[Any, Any]) -> Any:
    if isinstance(x, list | tuple):
        items = list(new_values.values())
        if hasattr(x, "_fields"):
            return type(x)(*items)
        return type(x)(items) if type(x) in (list, tuple) else items
    if isinstance(x, Mapping) and not isinstance(x, MutableMapping):
        return {key: value for key, value in new_values.items() if not isinstance(key, Attribute)}
    if not isinstance(x, Mapping) and all(
        new_values[key] is value for key, value in old_values.items()
    ):
        return x
    clone: Any = copy.copy(x)  # keeps its class and attributes
    for key, value in new_values.items():
        if isinstance(key, Attribute):
            object.__setattr__(clone, key, value)
        else:
            clone[key] = value
    return clone


def name_of(path: Path) -> str:
    """Return a path as text, such as ``batch["x"][0].ids``."""
    return "batch" + "".join(
        f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in path
    )
