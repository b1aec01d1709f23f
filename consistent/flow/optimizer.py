"""``flow.optimizer``: descriptions of optimizers, from which a job makes torch's optimizers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import session

Schedule = Callable[[int], float]


@dataclass(frozen=True, init=False)
class PiecewiseConstantScheduler:
    """Learning rate that is constant between ``boundaries``, called with the step.

    It is ``values[k]`` up to and including step ``boundaries[k]``, and the last value after the
    last boundary. Steps count from 0: ``PiecewiseConstantScheduler([10], [0.1, 0.01])`` gives 0.1
    for steps 0 to 10.
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]):
        if len(values) != len(boundaries) + 1:
            raise ValueError(
                f"PiecewiseConstantScheduler: {len(boundaries)} boundaries and {len(values)} "
                "values.\n"
                "  Boundaries lie between values.\n"
                f"  Give {len(boundaries) + 1} values."
            )
        # The dataclass is frozen; tuples keep it hashable.
        object.__setattr__(self, "boundaries", tuple(boundaries))
        object.__setattr__(self, "values", tuple(values))

    def __call__(self, step: int) -> float:
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class Optimizer:
    """Description of an optimizer, from which a job makes torch's optimizer when it first trains.

    ``lr_scheduler(step)`` returns the learning rate of a step.
    """

    lr_scheduler: Schedule

    def minimize(self, loss: Any) -> None:
        """Register ``loss``, which the optimizer step at the end of the running job minimises.

        The step uses the gradient of the mean of ``loss`` over all its elements on all devices, and
        changes the variables that the job has used.
        """
        session.require_run("minimize").add_loss(loss, self)

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return a new torch optimizer of ``parameters``."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if ``momentum`` is not 0."""

    momentum: float = 0.0

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr_scheduler(0), momentum=self.momentum)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction of both moments, as in torch."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(parameters, lr=self.lr_scheduler(0), betas=betas, eps=self.epsilon)


def add_loss(loss: Any) -> None:
    """Register ``loss`` to be minimised by the optimizer that ``function_config().train`` sets.

    It is called in a job's function, as ``losses.add_loss``. The step is taken when the function
    has returned.
    """
    session.require_run("losses.add_loss").add_loss(loss)
