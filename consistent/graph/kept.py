"""Detection of argument objects in which a module keeps tensors between calls.

Examples are a cache of keys and values, and a list of intermediate results. A recorded program
reuses the objects of the recording, which hold stand-ins without values, and all micro-batches
would share them. So a module that keeps tensors in such an object raises when it is recorded.
"""

from __future__ import annotations

import types
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from ..spec.nested import tensors_in

_MAX_DEPTH = 8  # levels of attributes and elements that are searched
# Types that are not searched.
_UNSEARCHED_TYPES = (
    torch.Tensor, str, bytes, type, torch.nn.Module, types.FunctionType, types.MethodType,
    types.ModuleType,
)  # fmt: skip


class ArgumentsSnapshot:
    """Snapshot of the objects in a module's arguments, taken before the module is called.

    It finds objects in which the module keeps tensors, such as a cache of keys and values:
    recording a program then raises. ``given`` is the call's (args, kwargs).
    """

    def __init__(self, given: Any) -> None:
        self._arguments = given
        self._objects_before = dict(_reachable_objects(given))
        containers = [x for x in self._objects_before.values() if isinstance(x, list | dict | set)]
        self._sizes = {id(x): len(x) for x in containers}

    def holder_of_hidden_tensor(self, known: Container[int]) -> Any:
        """Return an argument object with a recorded tensor where recording does not look, or None.

        Arguments are searched for tensors in lists, tuples, dicts and the like, and not in
        attributes of other objects, such as a cache. ``known`` has the ids of recorded tensors.
        """
        visible_ids = {id(x) for x in tensors_in(self._arguments)}
        hidden_ids = [x for x in self._objects_before if x in known and x not in visible_ids]
        return self._argument_holding(set(hidden_ids)) if hidden_ids else None

    def changed_argument(self) -> Any:
        """Return an argument object that has gained tensors or changed its length, or None.

        Called after the call of the module.
        """
        for key, size in self._sizes.items():
            if len(self._objects_before[key]) != size:
                return self._objects_before[key]
        new_tensor_ids = {
            key
            for key, x in _reachable_objects(self._arguments)
            if key not in self._objects_before and isinstance(x, torch.Tensor)
        }
        return self._argument_holding(new_tensor_ids) if new_tensor_ids else None

    def _argument_holding(self, tensors: set[int]) -> Any:
        """Return the argument from which one of ``tensors`` can be reached; ``tensors`` are ids."""
        for x in _call_arguments(self._arguments):
            if any(key in tensors for key, _ in _reachable_objects(x)):
                return x
        return self._arguments


def _call_arguments(value: Any) -> Iterator[Any]:
    """Yield each argument of a call, positional and by keyword, from its (args, kwargs)."""
    for x in _contents(value):
        yield from _contents(x)


def _reachable_objects(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield (id, object) for everything that can be reached from ``value``, each object once.

    Values of attributes and items of containers count as reached.
    """
    seen: set[int] = set()
    level = [value]
    for _ in range(_MAX_DEPTH):
        next_level: list[Any] = []
        for x in level:
            if id(x) not in seen:
                seen.add(id(x))
                yield id(x), x
                next_level += _contents(x)
        level = next_level


def _contents(x: Any) -> list[Any]:
    """Return the values of the attributes of ``x``, and its items if it is a container.

    Tensors, modules, functions and the like are not looked into.
    """
    if isinstance(x, _UNSEARCHED_TYPES):
        return []
    values = list(getattr(x, "__dict__", {}).values())
    if isinstance(x, Mapping):
        return [*values, *x.values()]
    return [*values, *x] if isinstance(x, Sequence | Set) else values
