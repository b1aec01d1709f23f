"""What a checkpoint holds, as one rank of this world sees it."""

from __future__ import annotations

from typing import Any

import torch

from ..files.index import Index
from ..values import decode, tensors_in

_RANK = "@rank"


def on_rank(name: str, rank: int) -> str:
    """The name under which a tensor that differs between ranks is saved of this one."""
    return f"{name}{_RANK}{rank}"


def without_rank(name: str) -> str:
    """The way back."""
    base, at, rank = name.rpartition(_RANK)
    return base if at and rank.isdigit() else name


class TensorName(str):
    """Stands for a tensor of the checkpoint in a value."""


class Stored:
    """A checkpoint and the rank that reads it.

    Args:
        rank, ranks: of this world.
    """

    def __init__(self, index: Index, rank: int, ranks: int) -> None:
        self.index, self._rank, self._ranks = index, rank, ranks
        self._tensors: Any = index.tensors.state_dict_metadata

    @property
    def tensors(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    @property
    def names(self) -> list[str]:
        """The names that were given to ``save``, or that stand first in names of tensors."""
        return sorted({*self.index.values, *(key.split(".")[0] for key in self._tensors)})

    def shape(self, key: str) -> torch.Size:
        """The shape of a tensor."""
        return self._tensors[key].size

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[key].properties.dtype

    def text(self, name: str) -> Any:
        """The value of this name as ``values.encode`` writes it.

        Raises:
            ValueError: each rank saved another one, and there were other ranks.
        """
        text = self.index.values[name]
        if not self._differs(name):
            return text
        if self._ranks == self.index.ranks:
            return text[self._rank] if name in self.index.differing else text
        if name == "random":  # see RandomState
            return {"torch": (text[0] if name in self.index.differing else text)["torch"]}
        raise ValueError(
            f"{name}: its value differed between the {self.index.ranks} ranks that saved it, and "
            f"here are {self._ranks}. Save one that is the same on all ranks."
        )

    def _differs(self, name: str) -> bool:
        differing = self.index.differing
        return name in differing or any(each.startswith(f"{name}.") for each in differing)

    def key(self, name: str) -> str:
        """The name in the file of a tensor that a value names."""
        if name not in self.index.differing:
            return name
        return on_rank(name, self._rank if self._ranks == self.index.ranks else 0)

    def tensor_names(self, name: str) -> list[str]:
        """The names of the tensors in a value."""
        return tensors_in(self.text(name))

    def value(self, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        """A value; its tensors are ``tensors``, or stand there by their names."""
        return decode(self.text(name), TensorName if tensors is None else tensors.__getitem__)
