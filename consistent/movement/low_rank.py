"""Low-rank compression of sums of matrices over ranks (PowerSGD, Vogels et al. 2019).

A sum is sent as the product of two thin matrices:

```
m = g + unsent      n x m on each rank
p = m basis         n x r    ==all-reduce==>    columns made orthonormal
q = m' p            m x r    ==all-reduce==>    kept as the next basis
sum = p q'                   each rank makes its own part
unsent = m - p (its own q)'  what of this rank's addend is not in the sum
```

If p and q of all ranks are summed in the order of ranks, every rank has the same bits of both, and
so the same basis in every later step. The thin matrices may be sent by a codec themselves. The
codec's rounding of p changes the basis a little and nothing else; its rounding error of q becomes
part of the unsent rest (``unsent``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.codecs import Codec

from ..spec import piece


@dataclass(frozen=True)
class LowRank:
    """Codec that sends a sum of matrices as a product of two thin matrices of ``rank`` columns.

    A tensor with more dims counts as a matrix, (first dim) x (all others); one with fewer than two
    dims is sent in full.

    Args:
        rank: the number of columns of the thin matrices.
        thin: the codec by which they are sent; None sends them in float32.
    """

    rank: int
    thin: Codec | None = None

    @property
    def name(self) -> str:
        """Name of the codec in a parallelization plan, such as "powersgd:4:int8"."""
        return f"powersgd:{self.rank}" + ("" if self.thin is None else f":{self.thin.name}")

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether sums of tensors of ``shape`` take fewer bytes by this codec than without.

        The thin matrices are all-reduced, which counts twice, and without the codec the tensor
        would be reduce-scattered, which counts once.
        """
        if len(shape) < 2:
            return False
        thin = sum(map(self._nbytes, self.thin_numels(shape)))
        return 2 * thin < math.prod(shape) * dtype.itemsize

    def thin_numels(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return how many elements the two thin matrices, p and q, have for ``shape``.

        [n, m] takes rank * n and rank * m.
        """
        rows, columns = _matrix_shape(shape)
        return self.rank * rows, self.rank * columns

    def sent_bytes(self, shape: Sequence[int], ranks: int) -> int:
        """Return the bytes that the busiest of ``ranks`` sends for a sum of tensors of ``shape``.

        Each matrix is summed in parts: a rank sends each other rank its part, and then its own part
        of the sum to all of them.
        """
        if self.thin is None:
            return 2 * (ranks - 1) * 4 * sum(self.thin_numels(shape)) // ranks
        bytes_by_rank = [0] * ranks
        for n in self.thin_numels(shape):
            parts = [self._nbytes(piece(n, ranks, k)[1]) for k in range(ranks)]
            bytes_by_rank = [
                sent + sum(parts) + (ranks - 2) * own
                for sent, own in zip(bytes_by_rank, parts, strict=True)
            ]
        return max(bytes_by_rank)

    def _nbytes(self, n: int) -> int:
        return 4 * n if self.thin is None else self.thin.nbytes(n)


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix, such as (2, 12) for [2, 3, 4]."""
    return shape[0], math.prod(shape[1:])


def first_basis(shape: Sequence[int], rank: int, device: torch.device) -> Tensor:
    """Return the initial basis for tensors of ``shape``: random, and the same on every rank."""
    # Drawn on the CPU with a fixed seed, so that it is the same on every rank and device.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_matrix_shape(shape)[1], rank, generator=generator).to(device)


def as_matrix(x: Tensor) -> Tensor:
    """Return ``x`` as a float32 matrix: its first dim as rows, all others flattened as columns."""
    return x.reshape(x.shape[0], -1).float()


def orthonormalize(p: Tensor) -> Tensor:
    """Return a matrix with orthonormal columns that span the same space as the columns of ``p``.

    By Gram-Schmidt, done twice: where a column nearly lies in the span of those before it, what one
    pass leaves of it is mostly rounding error. A column of zeros stays zero.
    """
    columns: list[Tensor] = []
    for column in p.unbind(1):
        if columns:
            previous_columns = torch.stack(columns, 1)
            for _ in range(2):
                column = column - previous_columns @ (previous_columns.T @ column)
        columns.append(_normalize(column, 0))
    return torch.stack(columns, 1)


def next_basis(q: Tensor, first: Tensor) -> Tensor:
    """Return the columns of ``q``, scaled to length one, as the basis of the next sum.

    A column that is zero or not finite would stay so, and is replaced by that column of ``first``,
    the initial basis.
    """
    basis = _normalize(q, 0)
    size = basis.abs().sum(0)
    return torch.where(torch.isfinite(size) & (size > 0), basis, first)


def _normalize(x: Tensor, dim: int) -> Tensor:
    # The least positive number in place of 0 keeps a zero column zero instead of NaN.
    """Return ``x`` divided by its norm along ``dim``; zeros stay zeros."""
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(
        torch.finfo(x.dtype).tiny
    )


def part_of_product(
    p: Tensor, q: Tensor, shape: Sequence[int], dim: int, start: int, size: int
) -> Tensor:
    """Return the part [start, start + size) along ``dim`` of ``p q'``, viewed as ``shape``."""
    if dim == 0:
        return (p[start : start + size] @ q.T).view(size, *shape[1:])
    return (p @ q.T).view(tuple(shape)).narrow(dim, start, size)
