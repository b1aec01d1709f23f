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

from .guards import Guard, is_simple_value
from .reached import ReachableState

Optimizer = torch.optim.Optimizer


class _TrackedGroup(dict):
    """Copy of an optimizer's param group that reports to ``rates`` which of its entries are read.

    It replaces the group ``group`` during a recording. Writes also go into the original.
    """

    def __init__(self, group: dict[str, Any], rates: Rates) -> None:
        super().__init__(group)
        self.group, self._rates = group, rates

    def __getitem__(self, key: Any) -> Any:
        self._rates.note_read(self.group, key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._rates.note_read(self.group, key)
        return super().get(key, default)

    # An own __iter__ makes dict(group) and {**group} call __getitem__ for each key, instead of
    # copying in C.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def items(self) -> Any:
        self._note_all_reads()
        return super().items()

    def values(self) -> Any:
        self._note_all_reads()
        return super().values()

    def copy(self) -> Any:
        return dict(self.items())

    def _note_all_reads(self) -> None:
        for key in self:
            self._rates.note_read(self.group, key)

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

    def __init__(self, reached: ReachableState) -> None:
        self._reached, self._optimizers = reached, reached.optimizers
        self._read_entries: set[tuple[int, Any]] = set()
        self._read_schedules: set[int] = set()
        self._numbers_before = self._current_numbers()
        self._is_tracking = False
        self._changed_keys: set[Any] = set()

    def _current_numbers(self) -> list[dict[str, Any]]:
        return [numbers(group) for o in self._optimizers for group in _groups(o)]

    def note_read(self, group: dict, key: Any) -> None:
        """Note that entry ``key`` of the param group ``group`` is read, if tracking is on.

        Called by ``_TrackedGroup``, for each read.
        """
        if self._is_tracking:
            self._read_entries.add((id(group), key))

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track which param group entries and schedule attributes are read, inside the block."""
        classes = [type(schedule) for schedule in self._reached.schedules]
        for schedule, cls in zip(self._reached.schedules, classes, strict=True):
            schedule.__class__ = _tracked_class(cls, self._note_schedule_read)
        self._set_tracking(True)
        try:
            yield
        finally:
            self._set_tracking(False)
            for schedule, cls in zip(self._reached.schedules, classes, strict=True):
                schedule.__class__ = cls

    def _note_schedule_read(self, schedule: Any, attributes: dict[str, Any], name: str) -> None:
        if (
            self._is_tracking
            and name not in _ATTRIBUTES_WITHOUT_NUMBERS
            and (name in attributes or name in _ALL_ATTRIBUTES)
        ):
            self._read_schedules.add(id(schedule))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend tracking inside the block, in which an optimizer or a schedule runs ``step()``.

        Numbers that are set inside the block do not count as set by the compiled step.
        """
        was_tracking = self._is_tracking
        if was_tracking:
            self._set_tracking(False)
            self._note_changes()
        try:
            yield
        finally:
            if was_tracking:
                self._numbers_before = self._current_numbers()
                self._set_tracking(True)

    def _set_tracking(self, on: bool) -> None:
        self._is_tracking = on
        for optimizer in self._optimizers:
            groups = _groups(optimizer)
            # In place, because a guard requires that the list stays the same object.
            optimizer.param_groups[:] = [_TrackedGroup(g, self) for g in groups] if on else groups

    def _note_changes(self) -> None:
        for before, current in zip(self._numbers_before, self._current_numbers(), strict=False):
            keys = before.keys() | current.keys()
            self._changed_keys |= {key for key in keys if before.get(key) != current.get(key)}

    def guards(self, called: set[int]) -> list[Guard]:
        """Return the guards on optimizers and schedules under which the program is valid.

        They cover the numbers that the step itself has read and, for each optimizer that was
        recorded, all its numbers except learning rates.

        Args:
            called: ids of the optimizers that were not recorded, and run as written.
        """
        guards_by_schedule = self._reached.schedule_guards
        schedule_guards = [
            f
            for key in guards_by_schedule
            if key in self._read_schedules
            for f in guards_by_schedule[key]
        ]
        return schedule_guards + [
            guard
            for optimizer, guards in self._reached.optimizer_guards.items()
            for guard in guards
            if (id(guard.store), guard.key) in self._read_entries
            or (optimizer not in called and guard.key != "lr")
        ]

    def changed_numbers(self) -> list[str]:
        """Return descriptions of the numbers that the step itself sets, such as "a learning rate".

        If there are any, the step gets no program, and the message to the user names them.
        """
        self._note_changes()
        return [
            "a learning rate" if key == "lr" else f"{key} of an optimizer"
            for key in sorted(self._changed_keys)
        ]


# Attributes of a schedule that hold no numbers; the recording sets ``step`` on the object.
_ATTRIBUTES_WITHOUT_NUMBERS = ("optimizer", "step")
_ALL_ATTRIBUTES = ("__dict__", "__getstate__")  # these give all attributes; copies use the latter


def _tracked_class(cls: Any, on_access: Callable[[Any, dict[str, Any], str], None]) -> type:
    """Return a subclass of ``cls``, a schedule's class, that reports access to attributes.

    ``on_access(object, its __dict__, name)`` is called before each read and write of an attribute.
    """
    get_raw, read, write = object.__getattribute__, cls.__getattribute__, cls.__setattr__

    def get(self: Any, name: str) -> Any:
        on_access(self, get_raw(self, "__dict__"), name)
        return read(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        on_access(self, get_raw(self, "__dict__"), name)
        write(self, name, value)

    namespace = {"__getattribute__": get, "__setattr__": put, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), namespace)


class Varying:
    """Set of the optimizers whose numbers, except learning rates, differ between recordings.

    A recording would make these numbers constants of the program, valid for one call only, so such
    optimizers run as written.
    """

    def __init__(self) -> None:
        self._first_numbers: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._varying: WeakSet[Optimizer] = WeakSet()

    def note(self, optimizers: list[Optimizer]) -> None:
        """Compare the numbers of ``optimizers`` with those at earlier recordings.

        Optimizers for which they differ are added to this set. Called at the start of each
        recording.
        """
        for optimizer in optimizers:
            current_numbers = [
                {key: x for key, x in numbers(group).items() if key != "lr"}
                for group in _groups(optimizer)
            ]
            if self._first_numbers.setdefault(optimizer, current_numbers) != current_numbers:
                self._varying.add(optimizer)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._varying


def numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that are numbers, strings or other simple values."""
    return {key: x for key, x in group.items() if is_simple_value(x)}


def _groups(optimizer: Optimizer) -> list[dict]:
    return [getattr(group, "group", group) for group in optimizer.param_groups]
