"""Calls that keep numbers in Python: optimizers, learning rate schedules, gradient scalers.

AdamW and Adam can keep their count of steps, and their learning rate, in tensors; then they are
recorded like all else. The others are lines of their own, and run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mirrored.transports.base.unseen import unseen

from ..nn.nested import tensors_in
from .program import Source
from .recorder import Recorder
from .state import Fact, State

_BY_TENSORS = (torch.optim.Adam, torch.optim.AdamW)
_MISSING: Any = object()


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
        self._on = False

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
            if self._changed is False:
                self._changed = self._now() != self._before
        try:
            yield
        finally:
            if on:
                self._before = self._now()
                self._put(True)

    _changed = False

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


@contextmanager
def listening(
    recorder: Recorder,
    state: State,
    rates: Rates,
    changes: Callable[[], list[Any]],
    know: Callable[[], None],
) -> Iterator[None]:
    """Inside, such calls come here. ``changes`` gives what the step has put into places so far, and
    ``know`` takes note of what is there after a call."""

    def live(owner: Any, method: str, text: str) -> Callable[..., Any]:
        original = getattr(owner, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            with rates.let():
                if tensors_in((args, kwargs)) and not recorder.is_paused:
                    recorder.refuse(
                        f"{text} is given a tensor, and it is called as it is written, beside the "
                        "program.\n  Call it outside the step."
                    )
                if recorder.is_paused:
                    return original(*args, **kwargs)
                recorder.check_seeds()
                recorder.live_objects.add(id(owner))
                writes = changes()
                out = recorder.live(lambda: original(*args, **kwargs), text, writes)
                know()
                return out

        return called

    def traced(optimizer: Any) -> Callable[..., Any]:
        original = optimizer.step

        def called(*args: Any, **kwargs: Any) -> Any:
            with rates.let():
                if recorder.is_paused:
                    return original(*args, **kwargs)
                if _makes_state(optimizer):  # which the next call will not
                    with recorder.paused():
                        return original(*args, **kwargs)
                with _by_tensors(recorder, optimizer):
                    return original(*args, **kwargs)

        return called

    with ExitStack() as stack:
        for optimizer in state.optimizers:
            name = f"{type(optimizer).__name__}.step"
            by_tensors = _is_by_tensors(optimizer)
            made = traced(optimizer) if by_tensors else live(optimizer, "step", name)
            stack.enter_context(_put(optimizer, "step", made))
        for schedule in state.schedules:
            name = f"{type(schedule).__name__}.step"
            stack.enter_context(_put(schedule, "step", live(schedule, "step", name)))
        for scaler in state.scalers:
            for method in ("step", "update", "unscale_"):
                made = live(scaler, method, f"GradScaler.{method}")
                stack.enter_context(_put(scaler, method, made))
        yield


@contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def _is_by_tensors(optimizer: Any) -> bool:
    """A fused one is one op of torch already, which compilers do not know with a tensor as rate."""
    return type(optimizer) in _BY_TENSORS and not any(
        group.get("differentiable") or group.get("fused") for group in optimizer.param_groups
    )


def _makes_state(optimizer: Any) -> bool:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any(p.grad is not None and not optimizer.state.get(p) for p in params)


@contextmanager
def _by_tensors(recorder: Recorder, optimizer: Any) -> Iterator[None]:
    """Inside, the optimizer reads its count of steps and its learning rate in ops. The count is in
    float64 for that time: in float32, the correction of the bias loses four digits to what Python
    computes."""
    kept, counts = [], []
    for of_one in optimizer.state.values():
        count = of_one.get("step")
        if isinstance(count, torch.Tensor) and count.dtype is torch.float32:
            of_one["step"] = count.double()
            counts.append((of_one, count))
    for group in optimizer.param_groups:
        kept.append((group, group["lr"], group.get("capturable")))
        if isinstance(group["lr"], float | int):
            with unseen():
                rate = torch.tensor(float(group["lr"]), dtype=torch.float64)
            recorder.keep(rate)
            recorder.know(Source("rate", group, rate), rate)
            group["lr"] = rate
        group["capturable"] = True
    try:
        yield
    finally:
        for group, rate, capturable in kept:
            group["lr"], group["capturable"] = rate, capturable
        for of_one, count in counts:
            count.copy_(of_one["step"])
            of_one["step"] = count
