"""Where a step keeps what lasts between its calls: found by walking from what it can reach.

```
slot    a tensor, and where it is kept: read anew before every run, so it may be replaced
fact    a number, a word, a length: what the program was recorded with, and what it may not change
```

What is reached: arguments that are modules or optimizers, the object of a bound method, the
variables that a function closes over, the globals that it names, and from there lists, tuples,
dicts, modules, optimizers, scalers and plain objects.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

MOST = 200_000
_FACTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, complex)
_LIBRARIES = ("consistent", "mirrored", "torch")
_LOOKED_INTO = "consistent.step."  # a graph, its config and its optimizers
_ABSENT: Any = object()


class Slot(NamedTuple):
    """A place that holds a tensor.

    Args:
        store: a dict, list, tuple, cell, or the leaf whose gradient it is.
        key: the name, index or key in it.
        path: for messages, ``model.0.weight``.
    """

    store: Any
    key: Any
    path: str

    def read(self) -> Any:
        """What is there now."""
        return _read(self.store, self.key)

    def write(self, value: Any) -> None:
        """Put ``value`` there."""
        if isinstance(self.store, torch.Tensor):
            self.store.grad = value
        elif isinstance(self.store, types.CellType):
            self.store.cell_contents = value
        else:
            self.store[self.key] = value


class Fact(NamedTuple):
    """A place that holds a number, a word, or an object by which the program was recorded."""

    store: Any
    key: Any
    path: str
    value: Any

    def holds(self) -> bool:
        """Whether it is as it was."""
        now = _read(self.store, self.key)
        return now is self.value or (type(now) is type(self.value) and now == self.value)


class _Length:
    def __repr__(self) -> str:
        return "length"


_LENGTH = _Length()


def _read(store: Any, key: Any) -> Any:
    if key is _LENGTH:
        return len(store)
    kind = type(store)
    if kind is dict:
        return store.get(key, _ABSENT)
    if isinstance(store, torch.Tensor):
        return store.grad
    if kind is types.CellType:
        return store.cell_contents
    if kind is list or kind is tuple:
        return store[key] if key < len(store) else _ABSENT
    return store.get(key, _ABSENT)


@dataclass
class State:
    """All that was found."""

    slots: list[Slot] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)


def find(step: Callable[..., Any], given: Any) -> State:
    """What ``step`` can reach, called with ``given``."""
    walk = _Walk()
    walk.arguments(given)
    walk.function(step, "step")
    walk.gradients()
    return walk.state


class _Walk:
    def __init__(self) -> None:
        self.state = State()
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._leaves: dict[int, tuple[Any, str]] = {}
        self._count = 0

    def visit(self, value: Any, path: str, store: Any, key: Any) -> None:
        """``value`` is at ``store[key]``."""
        if isinstance(value, torch.Tensor):
            if store is not None:
                self.state.slots.append(Slot(store, key, path))
            self._leaf(value, path)
            return
        if isinstance(value, _FACTS):
            if store is not None:
                self.state.facts.append(Fact(store, key, path, value))
            return
        if id(value) in self._seen:
            if store is not None:
                self.state.facts.append(Fact(store, key, path, value))
            return
        inside = self._inside(value, path)
        if inside is None:
            return
        if store is not None:
            self.state.facts.append(Fact(store, key, path, value))
        self._seen.add(id(value))
        self._alive.append(value)
        for name, at, where, x in inside:
            self._count += 1
            if self._count > MOST:
                raise RuntimeError(
                    f"consistent.compile: more than {MOST} values are reached from the step, the "
                    f"last at {path}.\n  Each of them could change what the step does.\n"
                    "  Pass the step what it needs as arguments, or keep large containers out of "
                    "the objects that it uses."
                )
            self.visit(x, name, at, where)

    def arguments(self, value: Any) -> None:
        """Modules and other objects among arguments; tensors and numbers are given anew with each
        call."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for x in value:
                self.arguments(x)
        elif isinstance(value, torch.Tensor):
            self._leaf(value, "argument")
        elif not isinstance(value, _FACTS):
            self.visit(value, "argument", None, None)

    def _inside(self, value: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]] | None:
        """(path, store, key, value) of what is in ``value``; None if it is not looked into."""
        state = self.state
        if isinstance(value, torch.nn.Module):
            state.modules.append(value)
            return self._module(value, path)
        if isinstance(value, torch.optim.Optimizer):
            state.optimizers.append(value)
            return self._optimizer(value, path)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            state.schedules.append(value)
            return iter(())
        if isinstance(value, torch.amp.GradScaler):
            state.scalers.append(value)
            return self._items(vars(value), path, ".")
        if type(value) in (list, tuple):
            return self._list(value, path)
        if isinstance(value, dict):
            return self._items(value, path, "")
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.function(value, path)
            return iter(())
        if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
            return None
        where = type(value).__module__
        if where.partition(".")[0] in _LIBRARIES and not where.startswith(_LOOKED_INTO):
            return None
        return self._items(vars(value), path, ".")

    def _module(self, module: torch.nn.Module, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
        for store in (module._parameters, module._buffers, module._modules):
            for name, x in store.items():
                yield f"{path}.{name}", store, name, x
        for name, x in vars(module).items():
            if not name.startswith("_") or isinstance(x, torch.Tensor):
                yield f"{path}.{name}", vars(module), name, x

    def _optimizer(self, optimizer: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
        yield f"{path}.param_groups", optimizer.param_groups, _LENGTH, len(optimizer.param_groups)
        for i, group in enumerate(optimizer.param_groups):
            for name, x in group.items():
                if name != "lr" or isinstance(x, torch.Tensor):
                    yield f"{path}.param_groups[{i}][{name!r}]", group, name, x
        yield f"{path}.state", optimizer.state, _LENGTH, len(optimizer.state)
        for i, (_, kept) in enumerate(list(optimizer.state.items())):
            yield f"{path}.state of parameter {i}", None, None, kept

    def _list(self, value: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
        yield path, value, _LENGTH, len(value)
        for i, x in enumerate(value):
            yield f"{path}[{i}]", value, i, x

    def _items(self, value: Any, path: str, dot: str) -> Iterator[tuple[str, Any, Any, Any]]:
        yield path, value, _LENGTH, len(value)
        for name, x in list(value.items()):
            where = f"{path}.{name}" if dot else f"{path}[{name!r}]"
            yield where, value, name, x

    def function(self, step: Any, path: str) -> None:
        """What a function closes over, the globals that it names, and its defaults."""
        if isinstance(step, functools.partial):
            self.visit(step.args, f"{path} argument", None, None)
            self.visit(step.keywords, f"{path} argument", None, None)
            self.function(step.func, path)
            return
        if isinstance(step, types.MethodType):
            self.visit(step.__self__, "self", None, None)
            step = step.__func__
        if not isinstance(step, types.FunctionType):
            self.visit(step, path, None, None)
            return
        if id(step) in self._seen or _is_librarys(step):
            return
        self._seen.add(id(step))
        self._alive.append(step)
        for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self.visit(value, name, cell, None)
        for i, value in enumerate(step.__defaults__ or ()):
            self.visit(value, f"{path}, default {i}", None, None)
        for name in _names(step.__code__):
            value = step.__globals__.get(name, _ABSENT)
            if value is not _ABSENT:
                self.visit(value, name, step.__globals__, name)

    # -- leaves ------------------------------------------------------------------------------------

    def _leaf(self, x: torch.Tensor, path: str) -> None:
        if x.requires_grad and x.is_leaf:
            self._leaves.setdefault(id(x), (x, path))

    def gradients(self) -> None:
        """A slot for the gradient of each leaf."""
        for x, path in self._leaves.values():
            self.state.slots.append(Slot(x, "grad", f"{path}.grad"))


def _is_librarys(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
