"""Places in which a step keeps state between its calls, such as attributes, dict entries and
``param.grad``."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ABSENT: Any = object()


class Source(NamedTuple):
    """A place that holds a tensor, such as an attribute; a program reads it again before each run.

    Args:
        store: the object that contains the place: a dict, list, tuple, closure cell,
            ``Attributes``, or, for a gradient, the leaf tensor.
        key: the name, index or key in the store.
        path: text for messages, such as ``model.0.weight``.
    """

    store: Any
    key: Any
    path: str

    def read(self) -> Any:
        """Return what the place holds now; ``ABSENT`` if the place does not exist."""
        return read(self.store, self.key)

    def write(self, value: Any) -> None:
        """Put ``value`` into the place."""
        if isinstance(self.store, torch.Tensor):
            self.store.grad = value
        elif isinstance(self.store, types.CellType):
            self.store.cell_contents = value
        elif isinstance(self.store, Attributes):
            setattr(self.store.owner, self.key, value)
        else:
            self.store[self.key] = value


class FunctionKey:
    """Key that stands for a property of the store instead of an entry.

    Example: with ``FunctionKey(len)``, ``read(items, key)`` returns ``len(items)``.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function


class Attributes(NamedTuple):
    """Store for attributes that are in no ``__dict__``, read by ``getattr(owner, key)``.

    Those are the attributes of classes, functions, and objects with slots.
    """

    owner: Any


def read(store: Any, key: Any) -> Any:
    """Return what ``store`` holds at ``key``, for all kinds of stores of a ``Source``.

    Return ``ABSENT`` if there is no such entry.
    """
    if type(key) is FunctionKey:
        return key.function(store)
    kind = type(store)
    if kind is dict:
        return store.get(key, ABSENT)
    if kind is Attributes:
        return getattr(store.owner, key, ABSENT)
    if isinstance(store, torch.Tensor):
        return store.grad
    if kind is types.CellType:
        return store.cell_contents
    if isinstance(store, list | tuple | deque):
        return store[key] if key < len(store) else ABSENT
    return store.get(key, ABSENT)
