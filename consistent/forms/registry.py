"""The registry of local forms, and what a form is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..movement import differentiable
from ..movement.world import my_coordinate
from ..rules.signature import Call, argument
from ..spec import Coordinate, Placement, TensorSpec


@dataclass(slots=True)
class Shards:
    """One op call on this rank: the function, its arguments with plain shards in place of
    tensors, the specs."""

    run: Callable[..., Any]
    call: Call
    axes: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]
    outs: tuple[TensorSpec, ...]
    args: tuple
    kwargs: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument called ``name``, with shards in place of tensors."""
        return argument(self.call, self.args, self.kwargs, name, default)

    @property
    def placement(self) -> Placement:
        """Placement of all operands."""
        return self.specs[0].placement

    @property
    def coordinate(self) -> Coordinate | None:
        """This rank's coordinate in the placement; None outside."""
        return my_coordinate(self.placement)

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output on this rank."""
        return self.outs[index].local_shape(self.coordinate)

    def region(self, index: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(starts, sizes) of operand ``index``'s shard in the logical tensor."""
        return self.specs[index].region(self.coordinate)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the form joins, this one among them, in the order of a split."""
        at = list(self.coordinate or (0,) * self.placement.ndim)
        found = []
        for places in itertools.product(*(range(self.placement.shape[a]) for a in self.axes)):
            for axis, place in zip(self.axes, places, strict=True):
                at[axis] = place
            found.append(self.placement.rank_at(at))
        return tuple(found)

    def regions(self, index: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """``region(index)`` of each of ``ranks``."""
        spec = self.specs[index]
        return [spec.region(self.placement.coordinate_of(rank)) for rank in self.ranks]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the form's axes; differentiable (its backward is the same sum)."""
        return differentiable.sum_over(x, self.placement, self.axes)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Largest over the ranks of the form's axes; not differentiable."""
        return differentiable.max_over(x, self.placement, self.axes)

    def min(self, x: torch.Tensor) -> torch.Tensor:
        """Smallest over the ranks of the form's axes; not differentiable."""
        return differentiable.min_over(x, self.placement, self.axes)

    @property
    def is_first(self) -> bool:
        """Whether this rank is first along the form's axes: the one that adds what must be added
        once."""
        at = self.coordinate
        return at is None or all(at[axis] == 0 for axis in self.axes)


FORMS: dict[str, Callable[[Shards], Any]] = {}


# Forms that raise for the values in a shard before their first message, and not after it.
RAISE_FIRST: set[str] = set()


def form(
    name: str, raises_first: bool = False
) -> Callable[[Callable[[Shards], Any]], Callable[[Shards], Any]]:
    """Enter a local form under ``name``. ``raises_first``: it raises for the values in a shard
    before its first message, and not after it."""

    def enter(function: Callable[[Shards], Any]) -> Callable[[Shards], Any]:
        if name in FORMS:
            raise ValueError(f'forms: a form named "{name}" exists already')
        FORMS[name] = function
        if raises_first:
            RAISE_FIRST.add(name)
        return function

    return enter
