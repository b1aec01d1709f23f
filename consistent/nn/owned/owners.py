"""Owners of the parameters that an optimizer steps whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from mirrored.transports.default import current

from ...dispatch.plans.shards import is_global
from ...dispatch.running.agreed import ranks_of
from ...spec import Placement
from ...tensor.storage.step_layout import OwnedState
from .deal import Load, Shape, deal

_NAME = "_owned"  # name of an optimizer's attribute; `sharded/step.py` reads it, too


class ParameterOwners:
    """The ranks that own an optimizer's parameters; the owner of a parameter steps it as a whole.

    Args:
        takes: (parameter group) -> whether its parameters are stepped whole.
        cost: (shape) -> the work of stepping a parameter.

    Attributes:
        under_way: the ``WholeStep`` that has begun and not ended; None otherwise.
    """

    def __init__(
        self, takes: Callable[[dict[str, Any]], bool], cost: Callable[[Shape], float]
    ) -> None:
        self.takes, self._cost = takes, cost
        self._of: dict[Any, int] = {}
        self._loads: dict[int, Load] = {}
        self.under_way: Any = None
        """The ``WholeStep`` that is under way, or None."""

    def params(self, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """Return the parameters that are stepped whole, including those of groups added later."""
        for group in optimizer.param_groups:
            if self.takes(group):
                yield from (p for p in group["params"] if is_global(p))

    def of(self, param: Any) -> Placement:
        """Return the owner of ``param``, as a placement of that one rank."""
        return _alone(param.placement.type, self._of[param])

    def deal(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign an owner, one of the ranks of its placement, to each parameter without one.

        If this optimizer is a copy of one that stepped whole matrices, the parameters keep the
        owners that hold their state.
        """
        new = [p for p in self.params(optimizer) if p not in self._of]
        if not new:
            return
        if any(isinstance(optimizer.state.get(p), OwnedState) for p in new):
            for p in new:
                if isinstance(kept := optimizer.state.get(p), OwnedState):
                    self._give(p, kept.owner.first_rank)
            new = [p for p in new if p not in self._of]
        for placement in dict.fromkeys(p.placement for p in new):
            here = [p for p in new if p.placement == placement]
            shapes = [tuple(p.shape) for p in here]
            costs = [float(self._cost(shape)) for shape in shapes]
            dealt = deal(shapes, costs, ranks_of(placement), self._loads)
            self._of.update(zip(here, dealt, strict=True))

    def _give(self, param: Any, rank: int) -> None:
        """Make ``rank`` the owner of ``param``, and add the cost to its load."""
        cost, count = self._loads.get(rank, (0.0, 0))
        self._loads[rank] = cost + float(self._cost(tuple(param.shape))), count + 1
        self._of[param] = rank

    def forget(self) -> None:
        """Forget all owners, because the parameters have moved; the next step assigns new ones."""
        self._of.clear()
        self._loads.clear()


def owners_of(optimizer: Any) -> ParameterOwners | None:
    """Return the ``ParameterOwners`` of ``optimizer``; None if it steps no parameter whole."""
    return optimizer.__dict__.get(_NAME)


def give_owners(optimizer: Any, owners: ParameterOwners) -> None:
    """Store ``owners`` with ``optimizer``, for ``owners_of``."""
    optimizer.__dict__[_NAME] = owners


@lru_cache
def _alone(kind: str, rank: int) -> Placement:
    """Return the placement of one rank, the same object in each call."""
    return Placement(kind, [rank])


def is_mine(owner: Placement) -> bool:
    """Return whether this rank is the one rank of the placement ``owner``.

    True on the rank that owns a parameter.
    """
    return current().rank_in(owner) == owner.first_rank
