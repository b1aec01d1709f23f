"""Tracking of reads and writes of the Python numbers in optimizers' param groups, such as learning
rates, while a step is recorded.

```
optimizer.step(), schedule.step()       allowed: a program reads the rate again in each run
the step: x * group["lr"]               the program is valid for that number only
the step: group["lr"] = 0.1             no program: it would not set the number
```

An optimizer that runs as written reads all its numbers again in each call. An optimizer that is
recorded reads only its learning rate again; its other numbers are constants of its ops. Once they
change from call to call, as momentum does under OneCycleLR, the optimizer runs as written. The
counts of a schedule matter only if the step reads them: a step may well reach a schedule, such as
``self.schedule``, that is stepped outside.
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
    """Copy of an optimizer's param group that reports to ``rates`` which of its entries are read.

    It replaces the group ``group`` during a recording. Writes also go into the original.
    """

    def __init__(self, group: dict[str, Any], rates: Rates) -> None:
        super().__init__(group)
        self.group, self._rates = group, rates

    def __getitem__(self, key: Any) -> Any:
        self._rates.asked(self.group, key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._rates.asked(self.group, key)
        return super().get(key, default)

    # An own __iter__ makes dict(group) and {**group} call __getitem__ for each key, instead of
    # copying in C.
    def __iter__(self) -> Iterator[Any]:
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
        # Also into the real group, which is put back after the recording.
        self.group[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.group.update(*args, **kwargs)


class Rates:
    """Tracker of the learning rates and other numbers of optimizers during a recording.

    Optimizers and schedules may read and set them in their own ``step()``. If the step itself reads
    a number, its program is valid for that number only; if the step itself sets one, there is no
    program.
    """

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
        """Note that entry ``key`` of the param group ``group`` is read, if tracking is on.

        Called by ``_Group``, for each read.
        """
        if self._on:
            self._asked.add((id(group), key))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Track which param group entries and schedule attributes are read, inside the block."""
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
        """Suspend tracking inside the block, in which an optimizer or a schedule runs ``step()``.

        Numbers that are set inside the block do not count as set by the compiled step.
        """
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
            # In place, because a guard requires that the list stays the same object.
            optimizer.param_groups[:] = [_Group(g, self) for g in groups] if on else groups

    def _note_changes(self) -> None:
        for before, now in zip(self._before, self._now(), strict=False):
            keys = before.keys() | now.keys()
            self._changed |= {key for key in keys if before.get(key) != now.get(key)}

    def guards(self, called: set[int]) -> list[Guard]:
        """Return the guards on optimizers and schedules under which the program is valid.

        They cover the numbers that the step itself has read and, for each optimizer that was
        recorded, all its numbers except learning rates.

        Args:
            called: ids of the optimizers that were not recorded, and run as written.
        """
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
        """Return descriptions of the numbers that the step itself sets, such as "a learning rate".

        If there are any, the step gets no program, and the message to the user names them.
        """
        self._note_changes()
        return [
            "a learning rate" if key == "lr" else f"{key} of an optimizer"
            for key in sorted(self._changed)
        ]


# Attributes of a schedule that hold no numbers; the recording sets ``step`` on the object.
_NO_NUMBERS = ("optimizer", "step")
_ALL = ("__dict__", "__getstate__")  # these give all attributes; copies use the latter


def _watching(cls: Any, asked: Callable[[Any, dict[str, Any], str], None]) -> type:
    """Return a subclass of ``cls``, a schedule's class, that reports access to attributes.

    ``asked(object, its __dict__, name)`` is called before each read and write of an attribute.
    """
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
    """Set of the optimizers whose numbers, except learning rates, differ between recordings.

    A recording would make these numbers constants of the program, valid for one call only, so such
    optimizers run as written.
    """

    def __init__(self) -> None:
        self._recorded: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._found: WeakSet[Optimizer] = WeakSet()

    def note(self, optimizers: list[Optimizer]) -> None:
        """Compare the numbers of ``optimizers`` with those at earlier recordings.

        Optimizers for which they differ are added to this set. Called at the start of each
        recording.
        """
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
    """Return the entries of a param group that are numbers, strings or other simple values."""
    return {key: x for key, x in group.items() if is_number(x)}


def _groups(optimizer: Optimizer) -> list[dict]:
    return [getattr(group, "group", group) for group in optimizer.param_groups]
