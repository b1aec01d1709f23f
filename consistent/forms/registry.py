"""Registry of local forms by name, and ``Shards``, the call that a form gets as its argument."""

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
    """The call of an op on this rank: the argument that each form gets.

    Args:
        run: torch's function for the op.
        call: the call as it was planned, with placeholders for its tensors.
        axes: the placement axes for which the form has to communicate.
        tensors: this rank's shards of the operands, as plain tensors.
        specs: specs of the operands.
        outs: specs of the outputs.
        args: positional arguments of the call, with shards in place of global tensors.
        kwargs: named arguments, likewise.
    """

    run: Callable[..., Any]
    call: Call
    axes: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]
    outs: tuple[TensorSpec, ...]
    args: tuple
    kwargs: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the call's argument called ``name``, with shards in place of global tensors.

        It is found whether it was passed by position or by name; ``default`` if it was not passed.
        """
        return argument(self.call, self.args, self.kwargs, name, default)

    @property
    def placement(self) -> Placement:
        """Placement of all operands."""
        return self.specs[0].placement

    @property
    def coordinate(self) -> Coordinate | None:
        """Coordinate of this rank in the placement, or None outside it."""
        return my_coordinate(self.placement)

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of output ``index`` on this rank."""
        return self.outs[index].local_shape(self.coordinate)

    def region(self, index: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (starts, sizes) of operand ``index``'s shard in the logical tensor.

        Rows 2 and 3 of a [4, 3] tensor: ``((2, 0), (2, 3))``.
        """
        return self.specs[index].region(self.coordinate)

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks among which the form communicates, this rank included.

        They are the ranks along ``axes``, in the order in which these would split a dim.
        """
        coordinate = list(self.coordinate or (0,) * self.placement.ndim)
        world_ranks = []
        for steps in itertools.product(*(range(self.placement.shape[a]) for a in self.axes)):
            for axis, step in zip(self.axes, steps, strict=True):
                coordinate[axis] = step
            world_ranks.append(self.placement.rank_at(coordinate))
        return tuple(world_ranks)

    def regions(self, index: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return ``region(index)`` of every rank in ``ranks``."""
        spec = self.specs[index]
        return [spec.region(self.placement.coordinate_of(rank)) for rank in self.ranks]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks along the form's axes.

        Differentiable; the backward is a sum too.
        """
        return differentiable.sum_over(x, self.placement, self.axes)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over the ranks along the form's axes.

        Not differentiable.
        """
        return differentiable.max_over(x, self.placement, self.axes)

    def min(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise minimum over the ranks along the form's axes.

        Not differentiable.
        """
        return differentiable.min_over(x, self.placement, self.axes)

    @property
    def is_first(self) -> bool:
        """True on the rank at coordinate 0 of each of the form's axes.

        Forms use it to add a term once to a sum over the ranks. Also True outside the placement.
        """
        coordinate = self.coordinate
        return coordinate is None or all(coordinate[axis] == 0 for axis in self.axes)


FORMS: dict[str, Callable[[Shards], Any]] = {}


# Forms that raise for bad values in a shard only before they send their first message.
RAISE_FIRST: set[str] = set()


def write_if_inplace(shard: Shards, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``; if the op is called in place, its first shard, with ``value`` written."""
    return shard.tensors[0].copy_(value) if shard.call.inplace else value


def form(
    name: str, raises_first: bool = False
) -> Callable[[Callable[[Shards], Any]], Callable[[Shards], Any]]:
    """Register a function as the local form called ``name``.

    Args:
        name: the name by which signatures refer to the form.
        raises_first: the form raises for bad values in a shard before it sends its first message,
            and never after.
    """

    def register(function: Callable[[Shards], Any]) -> Callable[[Shards], Any]:
        if name in FORMS:
            raise ValueError(f'forms: a form named "{name}" exists already')
        FORMS[name] = function
        if raises_first:
            RAISE_FIRST.add(name)
        return function

    return register
