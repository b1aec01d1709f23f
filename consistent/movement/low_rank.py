"""Sums of matrices, as products of two thin ones (PowerSGD, Vogels et al. 2019).

```
m = g + unsent      n x m on each rank
p = m basis         n x r    ==all-reduce==>    columns made orthonormal
q = m' p            m x r    ==all-reduce==>    kept as the next basis
sum = p q'                   each rank makes its own part
unsent = m - p (its own q)'  what of this rank's addend is not in the sum
```

Where p and q of all ranks are added up in their order, every rank has the same bits of both, and so
the same basis for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """Sums of matrices as products of rank ``rank``; other tensors as they are."""

    rank: int

    @property
    def name(self) -> str:
        """What a plan calls it."""
        return f"powersgd:{self.rank}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a sum of tensors of ``shape`` is sent in fewer bytes so than as it is: twice the
        thin matrices, once and back, in place of one half of that for the whole."""
        return len(shape) > 1 and 2 * self.numbers(shape) < math.prod(shape)

    def numbers(self, shape: Sequence[int]) -> int:
        """How many numbers the two thin matrices of a tensor of ``shape`` have."""
        return self.rank * sum(_sizes(shape))


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of ``shape`` as a matrix: its first dim, and the others."""
    return shape[0], math.prod(shape[1:])


def first_basis(shape: Sequence[int], rank: int, device: torch.device) -> Tensor:
    """A basis that has seen no gradient yet, the same on every rank."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(_sizes(shape)[1], rank, generator=drawn).to(device)


def matrix(x: Tensor) -> Tensor:
    """``x`` as a matrix of float32."""
    return x.reshape(x.shape[0], -1).float()


def orthonormal(p: Tensor) -> Tensor:
    """A matrix whose columns are orthonormal, and span what the columns of ``p`` do: Gram-Schmidt,
    done twice, as what is left of a column that the others nearly span is mostly rounding. A column
    of zeros stays so."""
    columns: list[Tensor] = []
    for column in p.unbind(1):
        if columns:
            before = torch.stack(columns, 1)
            for _ in range(2):
                column = column - before @ (before.T @ column)
        columns.append(_normal(column, 0))
    return torch.stack(columns, 1)


def next_basis(q: Tensor, first: Tensor) -> Tensor:
    """The columns of ``q``, of length one; those of ``first`` where one is zero or not finite, for
    it would stay so."""
    made = _normal(q, 0)
    size = made.abs().sum(0)
    return torch.where(torch.isfinite(size) & (size > 0), made, first)


def _normal(x: Tensor, dim: int) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(
        torch.finfo(x.dtype).tiny
    )


def part_of_product(
    p: Tensor, q: Tensor, shape: Sequence[int], dim: int, start: int, size: int
) -> Tensor:
    """The part ``[start, start + size)`` along ``dim`` of the product ``p q'``, which is taken as a
    tensor of ``shape``."""
    if dim == 0:
        return (p[start : start + size] @ q.T).view(size, *shape[1:])
    return (p @ q.T).view(tuple(shape)).narrow(dim, start, size)
