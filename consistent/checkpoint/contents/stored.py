"""The contents of a checkpoint, as one rank of this world reads them."""

from __future__ import annotations

from typing import Any

import torch

from ..files.index import Index
from ..values import decode, tensors_in

_RANK = "@rank"


def on_rank(name: str, rank: int) -> str:
    """Return the name under which ``rank`` saves its version of a tensor that differs by rank."""
    return f"{name}{_RANK}{rank}"


def without_rank(name: str) -> str:
    """Return a name without the suffix that ``on_rank`` adds."""
    base, at, rank = name.rpartition(_RANK)
    return base if at and rank.isdigit() else name


class TensorName(str):
    """Placeholder for a tensor of the checkpoint in a value: the tensor's name."""


class Stored:
    """A checkpoint, as one rank reads it.

    Args:
        rank, ranks: number of this rank and of all ranks in this world.
    """

    def __init__(self, index: Index, rank: int, ranks: int) -> None:
        self.index, self._rank, self._ranks = index, rank, ranks
        self._tensors: Any = index.tensors.state_dict_metadata

    @property
    def tensors(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    @property
    def names(self) -> list[str]:
        """Return the names that ``save`` was called with, or that tensor names begin with."""
        return sorted({*self.index.values, *(key.split(".")[0] for key in self._tensors)})

    def shape(self, key: str) -> torch.Size:
        """Return the shape of a tensor."""
        return self._tensors[key].size

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[key].properties.dtype

    def text(self, name: str) -> Any:
        """Return the value of this name as ``values.encode`` wrote it.

        Raises:
            ValueError: each rank saved a different value, and the number of ranks was another one.
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
        """Return the name in the file of a tensor that a value names."""
        if name not in self.index.differing:
            return name
        return on_rank(name, self._rank if self._ranks == self.index.ranks else 0)

    def tensor_names(self, name: str) -> list[str]:
        """Return the names of the tensors in a value."""
        return tensors_in(self.text(name))

    def value(self, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        """Return a value. Its tensors are taken from ``tensors``, or represented by a
        ``TensorName`` without it."""
        return decode(self.text(name), TensorName if tensors is None else tensors.__getitem__)
