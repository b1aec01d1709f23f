"""State of the API: what the jobs of a program share, and what one call of a job collects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..spec import Placement
from . import config
from .scope import ViewName, current_placement


class Minimizer(Protocol):
    """Protocol of optimizer descriptions, from which a job makes its torch optimizer.

    The classes of ``flow.optimizer`` implement this protocol.
    """

    @property
    def lr_scheduler(self) -> Callable[[int], float]: ...

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer: ...


@dataclass
class JobRun:
    """State of one call of a job, to which ops, layers and losses in its function add.

    Attributes:
        job: the job's name.
        view: "consistent" or "mirrored".
        placement: where the job runs.
        dtype: the dtype of its variables.
        names: how many layers without a name there were so far, by kind of layer.
        used: the variables used so far, by name.
        losses: the losses to minimise.
        optimizer: the description of the optimizer; None if none was given.
    """

    job: str
    view: ViewName
    placement: Placement
    dtype: torch.dtype
    names: Counter[str] = field(default_factory=Counter)  # unnamed layers so far, by kind
    used: dict[str, Any] = field(default_factory=dict)  # variables by name
    losses: list[Any] = field(default_factory=list)
    optimizer: Minimizer | None = None

    def add_loss(self, loss: Any, optimizer: Minimizer | None = None) -> None:
        """Register ``loss``, whose mean the optimizer step at the end of this job call minimises.

        ``optimizer`` describes the optimizer of that step. Raises ValueError if the job has another
        optimizer already.
        """
        if optimizer is not None and self.optimizer not in (None, optimizer):
            raise ValueError(
                f"minimize: job {self.job} has the optimizer {self.optimizer}, and now {optimizer} "
                "is given.\n"
                "  A job takes one step at its end, with one optimizer.\n"
                "  Minimise all losses with the same one, or make two jobs."
            )
        self.losses.append(loss)
        self.optimizer = optimizer or self.optimizer


variables: dict[str, Any] = {}  # by name, see variables/
loaded: dict[str, Path] = {}  # variable name -> the file from which it is loaded when it is made
_runs: list[JobRun] = []


def current_run() -> JobRun | None:
    """Return the state of the job call that is in progress, or None."""
    return _runs[-1] if _runs else None


def require_run(what: str) -> JobRun:
    """Return the state of the job call that is in progress; raise if there is none.

    ``what`` names the function that needs a job, for the error message.
    """
    if not _runs:
        raise RuntimeError(
            f"{what}: no job is running.\n"
            "  It belongs to the job that is called.\n"
            "  Call it in a function under @global_function, and call that function."
        )
    return _runs[-1]


@contextmanager
def enter_run(run: JobRun) -> Iterator[JobRun]:
    """Make ``run`` the job call in progress inside the ``with`` block, where its function runs."""
    _runs.append(run)
    try:
        yield run
    finally:
        _runs.pop()


def current_or_default_placement() -> Placement:
    """Return the placement for a new variable or tensor.

    The innermost entered scope decides, else the running job. Without both these are all devices
    that ``flow.config`` selects.
    """
    run = current_run()
    return current_placement() or (run.placement if run else config.devices())


def clear_default_session() -> None:
    """Delete all variables and reset ``flow.config``, as at the start of a program.

    Jobs have to be defined again.
    """
    variables.clear()
    loaded.clear()
    config.reset()
