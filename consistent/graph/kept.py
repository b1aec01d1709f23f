"""Python objects that modules of stages are given, and keep tensors in: a cache of keys and values,
a list of intermediate results.

A program of stages has the objects of the recording, in which there are stand-ins without values,
and all micro-batches would share them. So a module that keeps tensors in one raises when it is
recorded.
"""

from __future__ import annotations

import types
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from ..spec.nested import tensors_in

_DEEP = 8  # levels that are looked into
_CLOSED = (
    torch.Tensor, str, bytes, type, torch.nn.Module, types.FunctionType, types.MethodType,
    types.ModuleType,
)  # fmt: skip


class Kept:
    """What the arguments of a module hold before it is called."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._before = dict(_reached(given))
        grow = [x for x in self._before.values() if isinstance(x, list | dict | set)]
        self._sizes = {id(x): len(x) for x in grow}

    def hidden(self, known: Container[int]) -> Any:
        """The object in which there is one of the tensors ``known`` by their ids, and where nothing
        that changes the tensors among arguments would find it."""
        seen = {id(x) for x in tensors_in(self._given)}
        found = [x for x in self._before if x in known and x not in seen]
        return self._holder(set(found)) if found else None

    def changed(self) -> Any:
        """The object that holds other tensors since, or the list that grew."""
        for key, size in self._sizes.items():
            if len(self._before[key]) != size:
                return self._before[key]
        new = {
            key
            for key, x in _reached(self._given)
            if key not in self._before and isinstance(x, torch.Tensor)
        }
        return self._holder(new) if new else None

    def _holder(self, tensors: set[int]) -> Any:
        """The outermost object of the arguments' own in which one of ``tensors`` is."""
        for x in _opened(self._given):
            if any(key in tensors for key, _ in _reached(x)):
                return x
        return self._given


def _opened(value: Any) -> Iterator[Any]:
    """What is in the tuples and dicts that arguments come in."""
    for x in _inside(value):
        yield from _inside(x)


def _reached(value: Any) -> Iterator[tuple[int, Any]]:
    """(id, object) of what can be reached from ``value``, each once."""
    seen: set[int] = set()
    level = [value]
    for _ in range(_DEEP):
        below: list[Any] = []
        for x in level:
            if id(x) not in seen:
                seen.add(id(x))
                yield id(x), x
                below += _inside(x)
        level = below


def _inside(x: Any) -> list[Any]:
    if isinstance(x, _CLOSED):
        return []
    found = list(getattr(x, "__dict__", {}).values())
    if isinstance(x, Mapping):
        return [*found, *x.values()]
    return [*found, *x] if isinstance(x, Sequence | Set) else found
