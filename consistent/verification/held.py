"""One tensor of a step as all ranks of a run recorded it, and the tensor that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.reduction import ordered_reduce

from ..movement.recut import in_logical_order
from ..spec import Partial, Split, TensorSpec
from .watch import Key


@dataclass
class TensorOnRanks:
    """The values of one tensor of a step on all ranks, ``parts`` by rank.

    With a ``spec`` each value is a shard of a global tensor. With ``dtensor_layout``, the layout
    of a DTensor as text, each value is the whole of that DTensor. With neither each value is a
    plain tensor, of one process or of a program written by hand.
    """

    key: Key
    where: str
    spec: TensorSpec | None
    dtensor_layout: str
    parts: dict[int, Tensor]

    @property
    def values(self) -> list[Tensor]:
        """The values of all ranks, in the order of the ranks."""
        return [self.parts[rank] for rank in sorted(self.parts)]

    @property
    def layout(self) -> str:
        """The layout as it is written in a program, or that the tensor is plain."""
        if self.spec is None:
            return self.dtensor_layout or _plain_text(len(self.parts))
        return repr(self.spec)

    def whole(self) -> Tensor:
        """Return the logical tensor: the shards concatenated or summed, as the spec says."""
        assert self.spec is not None
        shards = [self.parts[rank] for rank in self.spec.placement.ranks.ravel().tolist()]
        grid = list(zip(self.spec.placement.shape, self.spec.sbp, strict=True))
        # From the innermost axis outwards, since each axis divides the shards of the one before it.
        for n, entry in reversed(grid):
            runs = [shards[k : k + n] for k in range(0, len(shards), n)]
            if isinstance(entry, Split):
                tensors = (torch.cat(run, entry.dim) for run in runs)
                shards = [in_logical_order(x, entry, n) for x in tensors]
            elif isinstance(entry, Partial):
                shards = [ordered_reduce(run, entry.op) for run in runs]
            else:
                shards = [run[0] for run in runs]
        return shards[0]

    def copies(self) -> list[list[Tensor]]:
        """Return groups of shards that must be equal: of ranks that differ on B axes only.

        Two ranks are in one group if their coordinates in the placement differ only on axes whose
        SBP is B (broadcast).
        """
        assert self.spec is not None
        groups: dict[tuple, list[Tensor]] = {}
        for rank, value in sorted(self.parts.items()):
            coordinate = self.spec.placement.coordinate_of(rank)
            assert coordinate is not None
            key = tuple(
                -1 if entry.is_broadcast else c
                for c, entry in zip(coordinate, self.spec.sbp, strict=True)
            )
            groups.setdefault(key, []).append(value)
        return list(groups.values())


def to_float64(x: Tensor) -> Tensor:
    """Return ``x`` in float64, a complex tensor as real and imaginary parts, to compare values."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def _plain_text(ranks: int) -> str:
    return f"plain on {ranks} ranks" if ranks > 1 else "plain"


def join_parts(values: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the ranks' values concatenated along the dim that gives ``shape``, or None.

    Called for plain tensors, of which it is not known along which dim they are split.
    """
    first = values[0]
    if first.ndim != len(shape):
        return None
    for dim, size in enumerate(shape):
        other_sizes = [(*v.shape[:dim], *v.shape[dim + 1 :]) for v in values]
        if sum(v.shape[dim] for v in values) == size and all(
            o == (*shape[:dim], *shape[dim + 1 :]) for o in other_sizes
        ):
            return torch.cat(list(values), dim)
    return None
