"""Learning rates that are numbers, and who asks for them or sets them while a step is recorded.

```
optimizer.step(), schedule.step()       may: a program reads the rate anew in each run
the step: x * group["lr"]               a program is for that number
the step: group["lr"] = 0.1             no program: it would not set it
```
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .state import Fact


class _Group(dict):
    """A group of an optimizer that notes who asks for its learning rate, or sets it."""

    def __init__(self, group: dict[str, Any], rates: Rates) -> None:
        super().__init__(group)
        self.group, self._rates = group, rates

    def __getitem__(self, key: Any) -> Any:
        if key == "lr":
            self._rates.asked(self.group)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key == "lr":
            self._rates.asked(self.group)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.group[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.group.update(*args, **kwargs)


class Rates:
    """The learning rates of optimizers, where they are numbers. Optimizers and schedules may use
    them in their own steps; where the step itself does, a program is for that number alone."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._asked: dict[int, dict] = {}
        self._before = self._now()
        self._on = self._changed = False

    def _now(self) -> list[Any]:
        return [g.get("lr") for o in self._optimizers for g in self._groups(o)]

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict]:
        return [getattr(group, "group", group) for group in optimizer.param_groups]

    def asked(self, group: dict) -> None:
        """The step asks for the rate of ``group``."""
        if self._on:
            self._asked[id(group)] = group

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, groups note who asks."""
        self._put(True)
        try:
            yield
        finally:
            self._put(False)

    @contextmanager
    def let(self) -> Iterator[None]:
        """Inside, an optimizer or a schedule does, which may; and what it sets is no write of the
        step's."""
        on = self._on
        if on:
            self._put(False)
            self._changed = self._changed or self._now() != self._before
        try:
            yield
        finally:
            if on:
                self._before = self._now()
                self._put(True)

    def _put(self, on: bool) -> None:
        self._on = on
        for optimizer in self._optimizers:
            groups = self._groups(optimizer)
            optimizer.param_groups[:] = [_Group(g, self) for g in groups] if on else groups

    @property
    def read(self) -> list[Fact]:
        """A fact for each rate that the step asked for."""
        return [
            Fact(g, "lr", "a learning rate", g["lr"])
            for g in self._asked.values()
            if not isinstance(g["lr"], torch.Tensor)
        ]

    def written(self) -> list[str]:
        """That the step set a rate."""
        same = self._now() == self._before and not self._changed
        return [] if same else ["a learning rate"]
