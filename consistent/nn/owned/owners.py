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
from .deal import Load, Shape, assign_owners

_OWNERS_KEY = "_owned"  # name of an optimizer's attribute; `sharded/step.py` reads it, too


class ParameterOwners:
    """The ranks that own an optimizer's parameters; the owner of a parameter steps it as a whole.

    Args:
        is_stepped_whole: (parameter group) -> whether its parameters are stepped whole.
        cost: (shape) -> the work of stepping a parameter.

    Attributes:
        current_step: the ``WholeStep`` that has begun and not ended; None otherwise.
    """

    def __init__(
        self, is_stepped_whole: Callable[[dict[str, Any]], bool], cost: Callable[[Shape], float]
    ) -> None:
        self.is_stepped_whole, self._cost = is_stepped_whole, cost
        self._owner_ranks: dict[Any, int] = {}
        self._loads: dict[int, Load] = {}
        self.current_step: Any = None
        """The ``WholeStep`` that is under way, or None."""

    def params(self, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """Return the parameters that are stepped whole, including those of groups added later."""
        for group in optimizer.param_groups:
            if self.is_stepped_whole(group):
                yield from (p for p in group["params"] if is_global(p))

    def owner_of(self, param: Any) -> Placement:
        """Return the owner of ``param``, as a placement of that one rank."""
        return _one_rank_placement(param.placement.type, self._owner_ranks[param])

    def assign(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign an owner, one of the ranks of its placement, to each parameter without one.

        If this optimizer is a copy of one that stepped whole matrices, the parameters keep the
        owners that hold their state.
        """
        new = [p for p in self.params(optimizer) if p not in self._owner_ranks]
        if not new:
            return
        if any(isinstance(optimizer.state.get(p), OwnedState) for p in new):
            for p in new:
                if isinstance(state := optimizer.state.get(p), OwnedState):
                    self._set_owner(p, state.owner.first_rank)
            new = [p for p in new if p not in self._owner_ranks]
        for placement in dict.fromkeys(p.placement for p in new):
            on_placement = [p for p in new if p.placement == placement]
            shapes = [tuple(p.shape) for p in on_placement]
            costs = [float(self._cost(shape)) for shape in shapes]
            owner_ranks = assign_owners(shapes, costs, ranks_of(placement), self._loads)
            self._owner_ranks.update(zip(on_placement, owner_ranks, strict=True))

    def _set_owner(self, param: Any, rank: int) -> None:
        """Make ``rank`` the owner of ``param``, and add the cost to its load."""
        cost, count = self._loads.get(rank, (0.0, 0))
        self._loads[rank] = cost + float(self._cost(tuple(param.shape))), count + 1
        self._owner_ranks[param] = rank

    def forget(self) -> None:
        """Forget all owners, because the parameters have moved; the next step assigns new ones."""
        self._owner_ranks.clear()
        self._loads.clear()


def owners_of(optimizer: Any) -> ParameterOwners | None:
    """Return the ``ParameterOwners`` of ``optimizer``; None if it steps no parameter whole."""
    return optimizer.__dict__.get(_OWNERS_KEY)


def set_owners(optimizer: Any, owners: ParameterOwners) -> None:
    """Store ``owners`` with ``optimizer``, for ``owners_of``."""
    optimizer.__dict__[_OWNERS_KEY] = owners


@lru_cache
def _one_rank_placement(kind: str, rank: int) -> Placement:
    """Return the placement of one rank, the same object in each call."""
    return Placement(kind, [rank])


def is_this_rank(owner: Placement) -> bool:
    """Return whether this rank is the one rank of the placement ``owner``.

    True on the rank that owns a parameter.
    """
    return current().rank_in(owner) == owner.first_rank
