"""optimizer: which of torch's optimizers takes a job's step."""

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
    """``values[k]`` up to step ``boundaries[k]``, then the last value; steps count from 0."""

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
        object.__setattr__(self, "boundaries", tuple(boundaries))
        object.__setattr__(self, "values", tuple(values))

    def __call__(self, step: int) -> float:
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class Optimizer:
    """A description; the job that minimises with it makes torch's optimizer and keeps its state."""

    lr_scheduler: Schedule

    def minimize(self, loss: Any) -> None:
        """Let the job take a step once its function has returned.

        The gradient is that of the mean of ``loss`` over all its elements on all devices; the
        variables that the job has used change.
        """
        session.running_in("minimize").add_loss(loss, self)

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """torch's optimizer."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent."""

    momentum: float = 0.0

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr_scheduler(0), momentum=self.momentum)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, its moments corrected for their bias as torch does."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(parameters, lr=self.lr_scheduler(0), betas=betas, eps=self.epsilon)


def add_loss(loss: Any) -> None:
    """``losses.add_loss``: minimise ``loss`` with what ``function_config().train`` says."""
    session.running_in("losses.add_loss").add_loss(loss)
