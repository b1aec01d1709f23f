"""Numbers in the groups of optimizers, and who asks for them or sets them while a step is recorded.

```
optimizer.step(), schedule.step()       may: a program reads the rate again in each run
the step: x * group["lr"]               a program is for that number
the step: group["lr"] = 0.1             no program: it would not set it
```

An optimizer that is called as it is written reads all its numbers again. One that is recorded so
reads its rate alone; the others are in its ops. Once these change from call to call, as momentum
does under OneCycleLR, it is called as it is written, too. What schedules count matters where the
step asks for it: it may well reach one, as ``self.schedule``, that is stepped outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from .guards import Guard, is_number
from .reached import Reached

Optimizer = torch.optim.Optimizer


class _Group(dict):
    """A group of an optimizer that notes who asks for a number in it, or sets it."""

    def __init__(self, group: dict[str, Any], rates: Rates) -> None:
        super().__init__(group)
        self.group, self._rates = group, rates

    def __getitem__(self, key: Any) -> Any:
        self._rates.asked(self.group, key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._rates.asked(self.group, key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:  # so dict(group) and {**group} ask for each key
        return super().__iter__()

    def items(self) -> Any:
        self._all_asked()
        return super().items()

    def values(self) -> Any:
        self._all_asked()
        return super().values()

    def copy(self) -> Any:
        return dict(self.items())

    def _all_asked(self) -> None:
        for key in self:
            self._rates.asked(self.group, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.group[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.group.update(*args, **kwargs)


class Rates:
    """The learning rates of optimizers and the other numbers of their groups. Optimizers and
    schedules may use them in their own steps; where the step itself does, a program is for that
    number alone."""

    def __init__(self, reached: Reached) -> None:
        self._reached, self._optimizers = reached, reached.optimizers
        self._asked: set[tuple[int, Any]] = set()
        self._asked_schedules: set[int] = set()
        self._before = self._now()
        self._on = False
        self._changed: set[Any] = set()

    def _now(self) -> list[dict[str, Any]]:
        return [numbers(group) for o in self._optimizers for group in _groups(o)]

    def asked(self, group: dict, key: Any) -> None:
        """The step asks for what ``group`` has at ``key``."""
        if self._on:
            self._asked.add((id(group), key))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, groups and schedules note who asks."""
        classes = [type(schedule) for schedule in self._reached.schedules]
        for schedule, cls in zip(self._reached.schedules, classes, strict=True):
            schedule.__class__ = _watching(cls, self._asked_of)
        self._put(True)
        try:
            yield
        finally:
            self._put(False)
            for schedule, cls in zip(self._reached.schedules, classes, strict=True):
                schedule.__class__ = cls

    def _asked_of(self, schedule: Any, kept: dict[str, Any], name: str) -> None:
        if self._on and name not in _NO_NUMBERS and (name in kept or name in _ALL):
            self._asked_schedules.add(id(schedule))

    @contextmanager
    def let(self) -> Iterator[None]:
        """Inside, an optimizer or a schedule does, which may; and what it sets is not a write of
        the step's."""
        on = self._on
        if on:
            self._put(False)
            self._note_changes()
        try:
            yield
        finally:
            if on:
                self._before = self._now()
                self._put(True)

    def _put(self, on: bool) -> None:
        self._on = on
        for optimizer in self._optimizers:
            groups = _groups(optimizer)
            optimizer.param_groups[:] = [_Group(g, self) for g in groups] if on else groups

    def _note_changes(self) -> None:
        for before, now in zip(self._before, self._now(), strict=False):
            keys = before.keys() | now.keys()
            self._changed |= {key for key in keys if before.get(key) != now.get(key)}

    def guards(self, called: set[int]) -> list[Guard]:
        """The guards of optimizers and schedules: what the step asked for, and all but the rates of
        optimizers that are not ``called`` as written."""
        of_schedules = self._reached.of_schedules
        asked = [
            f for key in of_schedules if key in self._asked_schedules for f in of_schedules[key]
        ]
        return asked + [
            guard
            for optimizer, guards in self._reached.of_optimizers.items()
            for guard in guards
            if (id(guard.store), guard.key) in self._asked
            or (optimizer not in called and guard.key != "lr")
        ]

    def written(self) -> list[str]:
        """What the step set."""
        self._note_changes()
        return [
            "a learning rate" if key == "lr" else f"{key} of an optimizer"
            for key in sorted(self._changed)
        ]


# Attributes of a schedule that are none of what it counts: ``step`` is put there for the recording.
_NO_NUMBERS = ("optimizer", "step")
_ALL = ("__dict__", "__getstate__")  # the latter for copies


def _watching(cls: Any, asked: Callable[[Any, dict[str, Any], str], None]) -> type:
    """A class like ``cls`` that tells ``asked`` which attributes its objects are asked for, or
    given."""
    kept_by, read, write = object.__getattribute__, cls.__getattribute__, cls.__setattr__

    def get(self: Any, name: str) -> Any:
        asked(self, kept_by(self, "__dict__"), name)
        return read(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        asked(self, kept_by(self, "__dict__"), name)
        write(self, name, value)

    own = {"__getattribute__": get, "__setattr__": put, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


class Varying:
    """The optimizers whose numbers, but for the rates, were others when a step was recorded
    before."""

    def __init__(self) -> None:
        self._recorded: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._found: WeakSet[Optimizer] = WeakSet()

    def note(self, optimizers: list[Optimizer]) -> None:
        """A step is recorded that has these."""
        for optimizer in optimizers:
            now = [
                {key: x for key, x in numbers(group).items() if key != "lr"}
                for group in _groups(optimizer)
            ]
            if self._recorded.setdefault(optimizer, now) != now:
                self._found.add(optimizer)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._found


def numbers(group: dict[str, Any]) -> dict[str, Any]:
    """What is a number or a word in a group."""
    return {key: x for key, x in group.items() if is_number(x)}


def _groups(optimizer: Optimizer) -> list[dict]:
    return [getattr(group, "group", group) for group in optimizer.param_groups]
