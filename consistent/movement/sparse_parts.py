"""The dense tensors that make up a sparse tensor, and sparse tensors without entries.

A sparse tensor consists of tensors of indices and values. Ranks that hold no part of it have one
without entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROW_LAYOUTS = (torch.sparse_csr, torch.sparse_bsr)
_ELEMENT_LAYOUTS = (torch.sparse_csr, torch.sparse_csc)  # torch makes no meta tensors of blocks
SPARSE_LAYOUTS = (torch.sparse_coo, *_ROW_LAYOUTS, torch.sparse_csc, torch.sparse_bsc)


def is_sparse(x: Tensor) -> bool:
    """Return whether ``x`` has a sparse layout, with indices and values."""
    return x.layout in SPARSE_LAYOUTS


def tensors_of_sparse(x: Tensor) -> tuple[Tensor, ...]:
    """Return the index and value tensors that make up a sparse ``x``, sharing its memory.

    COO has (indices, values); CSR has (row offsets, columns, values), and CSC the transposed.
    """
    x = x.detach()
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in _ROW_LAYOUTS:
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


def to_dense(x: Tensor) -> Tensor:
    """Return ``x`` as a strided tensor.

    A sparse meta tensor, which torch cannot convert, is replaced by a new meta tensor.
    """
    if x.layout is torch.strided:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_meta else x.to_dense()


def meta_like(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a ``meta`` tensor of this shape in the memory layout of ``like``, dense or sparse.

    A rank outside the placement holds such a tensor as its shard. A sparse one has no entries.
    """
    return MemoryLayout.of(like).empty(shape, dtype)


class MemoryLayout(NamedTuple):
    """The memory layout of a tensor, dense or sparse, for ranks that are outside its placement.

    Programs read it on all ranks, and optimizers take other steps for sparse gradients.
    """

    layout: torch.layout = torch.strided
    sparse_dims: int = 0

    @classmethod
    def of(cls, x: Tensor) -> MemoryLayout:
        """Return the memory layout of ``x``."""
        return cls(x.layout, x.sparse_dim() if x.layout is torch.sparse_coo else 0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a ``meta`` tensor in this memory layout; a sparse one has no entries."""
        shape = tuple(shape)
        if self.layout is torch.sparse_coo:
            indices = torch.empty((self.sparse_dims, 0), dtype=torch.int64, device="meta")
            values = torch.empty((0, *shape[self.sparse_dims :]), dtype=dtype, device="meta")
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        layout = self.layout if self.layout in _ELEMENT_LAYOUTS else torch.strided
        return torch.empty(shape, dtype=dtype, device="meta", layout=layout)


@torch.no_grad()
def fill(x: Tensor, parts: Sequence[Tensor], is_coalesced: bool) -> None:
    """Replace the indices and values of the sparse tensor ``x`` by ``parts``, in place.

    ``parts`` are as ``tensors_of_sparse`` returns them; ``is_coalesced`` says whether each index
    occurs once.
    """
    if x.layout is torch.sparse_coo:
        indices, values = parts
        x.data = torch.sparse_coo_tensor(
            indices, values, x.shape, is_coalesced=is_coalesced, check_invariants=False
        )
        return
    result = torch.sparse_compressed_tensor(
        *parts, size=x.shape, layout=x.layout, check_invariants=False
    )
    x.resize_as_sparse_(result).copy_(result)
