"""What an optimizer steps whole, and on which ranks."""

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

_NAME = "_owned"  # of an optimizer's attribute; `sharded/step.py` reads it too


class Owners:
    """The owners of an optimizer's parameters.

    Args:
        takes: whether the parameters of a group are stepped whole.
        cost: the work of stepping a parameter of this shape.
    """

    def __init__(
        self, takes: Callable[[dict[str, Any]], bool], cost: Callable[[Shape], float]
    ) -> None:
        self.takes, self._cost = takes, cost
        self._of: dict[Any, int] = {}
        self._loads: dict[int, Load] = {}
        self.under_way: Any = None
        """The step that is under way."""

    def params(self, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """The parameters that are stepped whole, those of groups that were added since too."""
        for group in optimizer.param_groups:
            if self.takes(group):
                yield from (p for p in group["params"] if is_global(p))

    def of(self, param: Any) -> Placement:
        """The placement of the one rank that owns ``param``."""
        return _alone(param.placement.type, self._of[param])

    def deal(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each parameter that has none an owner: a rank of its placement. Ranks ask each other
        who holds the state of a parameter, if it was stepped whole by another optimizer, of which
        this one is a copy."""
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
        cost, count = self._loads.get(rank, (0.0, 0))
        self._loads[rank] = cost + float(self._cost(tuple(param.shape))), count + 1
        self._of[param] = rank

    def forget(self) -> None:
        """Deal everything again at the next step: its parameters have gone elsewhere."""
        self._of.clear()
        self._loads.clear()


def owners_of(optimizer: Any) -> Owners | None:
    """The owners of what ``optimizer`` steps whole; None if it steps nothing so."""
    return optimizer.__dict__.get(_NAME)


def give_owners(optimizer: Any, owners: Owners) -> None:
    """From now on ``owners_of(optimizer)`` is ``owners``."""
    optimizer.__dict__[_NAME] = owners


@lru_cache
def _alone(kind: str, rank: int) -> Placement:
    return Placement(kind, [rank])


def is_mine(owner: Placement) -> bool:
    """Whether this rank is the one of ``owner``."""
    return current().rank_in(owner) == owner.first_rank
