"""What a planner is asked: a module, and the axis that it is laid out along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...spec import Split
from ..plan import Plan


@dataclass(frozen=True)
class Asked:
    """One axis to plan for.

    Args:
        module: the whole module; its tensors are plain.
        tensors: first name -> tensor, each tensor once.
        names: first name -> all names of that tensor.
        ranks: how many ranks the axis has.
        axis: the axis's name, for notes.
        others: plans of other axes that are known already.
    """

    module: torch.nn.Module
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, Sequence[str]]
    ranks: int
    axis: str = ""
    others: Sequence[Plan] = field(default_factory=tuple)

    def is_parameter(self, name: str) -> bool:
        """Whether the tensor of that first name is a parameter, not a buffer."""
        return isinstance(self.tensors[name], torch.nn.Parameter)

    def split_by_others(self, name: str) -> set[int]:
        """The dims of that tensor that other axes split, counted from the front."""
        dims: set[int] = set()
        for plan in self.others:
            layouts = plan.tensors.get(name)
            for entry in layouts.sbp if layouts else ():
                if isinstance(entry, Split):
                    dims.add(entry.dim % self.tensors[name].ndim)
        return dims
