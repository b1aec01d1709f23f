"""The dense tensors that a sparse tensor is made of: its indices and its values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
LAYOUTS = (torch.sparse_coo, *_BY_ROWS, torch.sparse_csc, torch.sparse_bsc)


def is_sparse(x: Tensor) -> bool:
    """Return whether ``x`` has a sparse layout, with indices and values."""
    return x.layout in LAYOUTS


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """Return the index and value tensors of a sparse ``x``, which share its memory."""
    x = x.detach()
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in _BY_ROWS:
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


@torch.no_grad()
def fill(x: Tensor, parts: Sequence[Tensor], is_coalesced: bool) -> None:
    """Replace the parts of the sparse ``x`` in place, with as many entries as ``parts`` have."""
    if x.layout is torch.sparse_coo:
        indices, values = parts
        x.data = torch.sparse_coo_tensor(
            indices, values, x.shape, is_coalesced=is_coalesced, check_invariants=False
        )
        return
    made = torch.sparse_compressed_tensor(
        *parts, size=x.shape, layout=x.layout, check_invariants=False
    )
    x.resize_as_sparse_(made).copy_(made)
