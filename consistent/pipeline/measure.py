"""Measure the forward time of each unit of a model on a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrored.every_rank import from_rank_0

from ..graph.module_calls import module_calls
from ..spec.nested import arguments_of
from .cut import Unit

RUNS = 3


def measure_units(
    model: torch.nn.Module, units: Sequence[Unit], sample: Any
) -> tuple[list[Unit], Callable[[Unit], float]]:
    """Return the units in call order, and a function from a unit to its forward seconds.

    Rank 0 takes the least of ``RUNS`` runs of ``model`` on ``sample`` and sends the times to the
    other ranks, so every rank must call this.

    Raises:
        RuntimeError: the model does not take the sample.
    """

    def least_seconds() -> dict[str, float]:
        runs = [_forward_seconds(model, units, sample) for _ in range(RUNS)]
        return {name: min(run[name] for run in runs) for name in runs[0]}

    # A simulated rank other than rank 0 receives None.
    unit_seconds = (
        from_rank_0("pipeline: rank 0 measures the model on the sample", least_seconds) or {}
    )
    order = {name: k for k, name in enumerate(unit_seconds)}
    ordered = sorted(units, key=lambda unit: order.get(unit.name, -1))
    return ordered, lambda unit: unit_seconds.get(unit.name, 0.0)


def _forward_seconds(
    model: torch.nn.Module, units: Sequence[Unit], sample: Any
) -> dict[str, float]:
    """Return {name of a unit: the seconds of its forward} of one run of the model."""
    seconds: dict[str, float] = {}
    begin_times: dict[str, float] = {}

    def begin(name: str, *_: Any) -> None:
        seconds.setdefault(name, 0.0)
        begin_times[name] = _synchronized_time()

    def end(name: str, *_: Any) -> None:
        seconds[name] += _synchronized_time() - begin_times[name]

    modules = ((unit.name, unit.module) for unit in units)
    # A measurement must not advance the random numbers of the program.
    with module_calls(modules, begin, end), torch.random.fork_rng(), torch.no_grad():
        args, kwargs = arguments_of(sample)
        model(*args, **kwargs)
    return seconds


def _synchronized_time() -> float:
    """Return the time in seconds, once GPUs have finished what was launched."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
