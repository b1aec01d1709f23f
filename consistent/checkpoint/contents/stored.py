"""The contents of a checkpoint, as one rank of the world that loads it sees them.

Values and tensors that differed between ranks are stored once for each rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ..files.index import Index
from ..values import decode, tensors_in

_RANK_SUFFIX = "@rank"


def on_rank(name: str, rank: int) -> str:
    """Return the name under which ``rank`` saves its version of a tensor that differs by rank.

    ``on_rank("mask", 3) -> "mask@rank3"``.
    """
    return f"{name}{_RANK_SUFFIX}{rank}"


def without_rank(name: str) -> str:
    """Return a name without the suffix that ``on_rank`` adds: ``"mask@rank3" -> "mask"``."""
    base, at, rank = name.rpartition(_RANK_SUFFIX)
    return base if at and rank.isdigit() else name


class TensorName(str):
    """Name of a tensor, as its placeholder in a value that is decoded before tensors are read.

    ``Stored.value`` puts one in place of each tensor if it is called without tensors.
    """


class Stored:
    """The contents of a checkpoint, as the rank that reads them sees them.

    Of values and tensors that differed between the ranks that saved them, it gives this rank's
    version.

    Args:
        index: what the checkpoint contains.
        rank, ranks: number of this rank, and of ranks, in the world that loads it.
    """

    def __init__(self, index: Index, rank: int, ranks: int) -> None:
        self.index, self._rank, self._ranks = index, rank, ranks
        self._tensors: Any = index.tensors.state_dict_metadata

    @property
    def tensors(self) -> list[str]:
        """The names of all tensors in the checkpoint, such as "model.fc.weight"."""
        return list(self._tensors)

    @property
    def names(self) -> list[str]:
        """The names of the objects in the checkpoint, such as "model", sorted.

        They are those that ``save`` was called with, or the first parts of tensors' names.
        """
        return sorted({*self.index.values, *(key.split(".")[0] for key in self._tensors)})

    def shape(self, key: str) -> torch.Size:
        """Return the logical shape of the tensor ``key``."""
        return self._tensors[key].size

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the tensor ``key``."""
        return self._tensors[key].properties.dtype

    def text(self, name: str) -> Any:
        """Return the value called ``name`` in the encoded form that ``values.encode`` wrote.

        Raises:
            ValueError: the value differed between the ranks that saved it, and another number of
                ranks loads it.
        """
        text = self.index.values[name]
        if not self._differs_by_rank(name):
            return text
        if self._ranks == self.index.ranks:
            return text[self._rank] if name in self.index.differing else text
        if name == "random":  # see RandomState
            return {"torch": (text[0] if name in self.index.differing else text)["torch"]}
        raise ValueError(
            f"{name}: its value differed between the {self.index.ranks} ranks that saved it, and "
            f"here are {self._ranks}. Save one that is the same on all ranks."
        )

    def _differs_by_rank(self, name: str) -> bool:
        differing = self.index.differing
        return name in differing or any(each.startswith(f"{name}.") for each in differing)

    def key(self, name: str) -> str:
        """Return the name in the file of the tensor that is called ``name`` in a value.

        If each rank saved its own version, it is ``on_rank(name, k)``, for this rank's number k if
        there are as many ranks as there were, and else for k = 0.
        """
        if name not in self.index.differing:
            return name
        return on_rank(name, self._rank if self._ranks == self.index.ranks else 0)

    def tensor_names(self, name: str) -> list[str]:
        """Return the names of the tensors in the value called ``name``."""
        return tensors_in(self.text(name))

    def value(self, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        """Return the decoded value called ``name``.

        ``tensors`` gives the tensors in it by name. Without it, a ``TensorName`` stands for each.
        """
        return decode(self.text(name), TensorName if tensors is None else tensors.__getitem__)
