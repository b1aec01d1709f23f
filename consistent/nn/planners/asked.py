"""Input of a planner: a module, and the placement axis to lay it out along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...spec import Split
from ..plan import Plan


@dataclass(frozen=True)
class PlanRequest:
    """What a planner is called with: a module, and one placement axis to lay it out along.

    A planner is a function from ``PlanRequest`` to the ``Plan`` for this axis.

    Args:
        module: the whole module; its tensors are plain.
        tensors: first name -> tensor, each tensor once.
        names: first name -> all names of that tensor, several if it is tied.
        ranks: the number of ranks along the axis.
        axis: the axis's name, for notes.
        others: the plans of other axes that were made before.
    """

    module: torch.nn.Module
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, Sequence[str]]
    ranks: int
    axis: str = ""
    others: Sequence[Plan] = field(default_factory=tuple)

    def first_name(self, name: str) -> str:
        """Return the name under which ``tensors`` has the tensor ``name``; ``name`` if it has none.

        The head of a model with tied weights: ``lm_head.weight -> wte.weight``.
        """
        if name in self.tensors:
            return name
        return next((first for first, names in self.names.items() if name in names), name)

    def is_parameter(self, name: str) -> bool:
        """Return whether the tensor with this first name is a parameter, not a buffer."""
        return isinstance(self.tensors[name], torch.nn.Parameter)

    def split_by_others(self, name: str) -> set[int]:
        """Return the dims of the tensor that plans of other axes split: ``{0}`` if one has S(0).

        They are counted from the front.
        """
        dims: set[int] = set()
        for plan in self.others:
            layouts = plan.tensors.get(name)
            for entry in layouts.sbp if layouts else ():
                if isinstance(entry, Split):
                    dims.add(entry.dim % self.tensors[name].ndim)
        return dims
