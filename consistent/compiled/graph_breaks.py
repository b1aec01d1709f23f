"""Graph breaks of a recording: calls of optimizers, learning rate schedules and gradient scalers
that are not recorded, because they keep numbers in Python.

A program makes these calls as written in every run. AdamW and Adam can keep their step count and
their learning rate in tensors, so they are recorded like other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from mirrored.transports.base.unseen import hidden_from_modes

from ..spec.nested import tensors_in
from .program import Read
from .rates import Rates, Varying
from .reached import ReachableState
from .recorder import Recorder

_RECORDABLE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
_MISSING: Any = object()


@contextmanager
def intercept_optimizers(
    recorder: Recorder,
    reached: ReachableState,
    rates: Rates,
    changes: Callable[[], list[Any]],
    note_sources: Callable[[], None],
    varying: Varying,
) -> Iterator[None]:
    """Intercept ``step()`` of optimizers and schedules, and calls of scalers, inside the block.

    Calls that cannot be recorded become graph breaks: the program calls them as written.

    Args:
        recorder: recorder of the step.
        reached: the objects that the step can reach, with its optimizers, schedules and scalers.
        rates: tracker of the numbers in the optimizers' param groups.
        changes: returns the tensors that the step has assigned to attributes, gradients and so on
            since ``changes`` was last called.
        note_sources: called after a graph break, to note which tensors these attributes then hold.
        varying: optimizers that are not recorded, because their numbers vary from call to call.
    """
    as_graph_break = partial(_as_graph_break, recorder, rates, changes, note_sources)
    with ExitStack() as stack:
        for optimizer in reached.optimizers:
            name = f"{type(optimizer).__name__}.step"
            is_recordable = _is_recordable(optimizer) and optimizer not in varying
            replacement = (
                _as_recorded_step(recorder, rates, optimizer)
                if is_recordable
                else as_graph_break(optimizer, "step", name)
            )
            stack.enter_context(_patched(optimizer, "step", replacement))
        for schedule in reached.schedules:
            name = f"{type(schedule).__name__}.step"
            stack.enter_context(_patched(schedule, "step", as_graph_break(schedule, "step", name)))
        for scaler in reached.scalers:
            for method in ("step", "update", "unscale_"):
                replacement = as_graph_break(scaler, method, f"GradScaler.{method}")
                stack.enter_context(_patched(scaler, method, replacement))
        yield


def _as_graph_break(
    recorder: Recorder,
    rates: Rates,
    changes: Callable[[], list[Any]],
    note_sources: Callable[[], None],
    owner: Any,
    method: str,
    text: str,
) -> Callable[..., Any]:
    """Return a replacement for a method of ``owner`` that makes its call a graph break.

    Called during a recording, it ends the segment of recorded ops, and runs the original method
    unrecorded. Arguments that are not listed here are those of ``intercept_optimizers``.

    Args:
        owner, method: an optimizer, schedule or scaler, and the name of its method.
        text: name of the method in messages, such as "SGD.step".
    """
    original = getattr(owner, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with rates.suspended():
            if tensors_in((args, kwargs)) and not recorder.is_paused:
                recorder.give_up(
                    f"{text} is given a tensor, and it is called as it is written, beside the "
                    "program.\n  Call it outside the step."
                )
            recorder.unrecorded_owners.add(id(owner))
            if recorder.is_paused:  # inside another such call, such as GradScaler.step
                return original(*args, **kwargs)
            recorder.check_seeds()
            writes = changes()
            out = recorder.break_graph(lambda: original(*args, **kwargs), text, writes)
            note_sources()
            return out

    return wrapper


def _as_recorded_step(recorder: Recorder, rates: Rates, optimizer: Any) -> Callable[..., Any]:
    """Return a replacement for ``optimizer.step`` that lets the ops of the optimizer be recorded.

    A call in which the optimizer creates its state runs unrecorded.
    """
    original = optimizer.step

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with rates.suspended():
            if recorder.is_paused:
                return original(*args, **kwargs)
            # This call creates the optimizer's state, which the next call will not do, so it is
            # not recorded.
            if _creates_state(optimizer):
                with recorder.paused():
                    return original(*args, **kwargs)
            with _numbers_in_tensors(recorder, optimizer):
                return original(*args, **kwargs)

    return wrapper


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    # The instance attribute hides the method of the class; removing it restores the method.
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def _is_recordable(optimizer: Any) -> bool:
    """Return whether the optimizer can keep step count and learning rate in tensors.

    Its ops are recorded if so. Adam and AdamW can. A fused one cannot: it is already a single torch
    op, which compilers do not support with a tensor as learning rate.
    """
    return type(optimizer) in _RECORDABLE_OPTIMIZERS and not any(
        group.get("differentiable") or group.get("fused") for group in optimizer.param_groups
    )


def _creates_state(optimizer: Any) -> bool:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any(p.grad is not None and not optimizer.state.get(p) for p in params)


@contextmanager
def _numbers_in_tensors(recorder: Recorder, optimizer: Any) -> Iterator[None]:
    """Let the optimizer read step count and learning rate from tensors, inside the block.

    Its ops can then be recorded. The count is float64 meanwhile: in float32, the bias correction
    would lose four digits compared with Python's arithmetic.
    """
    group_settings, counts = [], []
    for param_state in optimizer.state.values():
        count = param_state.get("step")
        if isinstance(count, torch.Tensor) and count.dtype is torch.float32:
            param_state["step"] = count.double()
            counts.append((param_state, count))
    for group in optimizer.param_groups:
        group_settings.append((group, group["lr"], group.get("capturable")))
        if isinstance(group["lr"], float | int):
            with hidden_from_modes():
                rate = torch.tensor(float(group["lr"]), dtype=torch.float64)
            recorder.recorded.keep_alive(rate)
            recorder.recorded.add_input(Read("rate", group, rate), rate)
            group["lr"] = rate
        group["capturable"] = True
    try:
        yield
    finally:
        for group, rate, capturable in group_settings:
            group["lr"], group["capturable"] = rate, capturable
        for param_state, count in counts:
            # Back into the float32 tensor, which is the object that the optimizer keeps.
            count.copy_(param_state["step"])
            param_state["step"] = count
