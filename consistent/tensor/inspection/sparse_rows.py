"""``x.sparse_mask(mask)`` where ``x`` is split and the entries of ``mask`` are rows.

Optimizers read their state so at the rows of a sparse gradient. These rows are taken, and of the
rest of ``x`` nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.plans.shards import is_global
from ...dispatch.running.whole_call import call_whole


def sparse_mask(x: Any, mask: Any) -> Any:
    """``Tensor.sparse_mask``: the entries of ``x`` at the places of ``mask``, B."""
    if not _takes_rows(x, mask):
        return call_whole("sparse_mask", torch.Tensor.sparse_mask, (x, mask), {})
    places = mask._indices()
    rows = x.index_select(0, places[0])
    return torch.sparse_coo_tensor(places, rows, x.shape, check_invariants=False, is_coalesced=True)


def _takes_rows(x: Any, mask: Any) -> bool:
    if not is_global(x) or not is_global(mask) or x._spec.placement != mask._spec.placement:
        return False
    by_rows = mask.layout is torch.sparse_coo and mask.sparse_dim() == 1 and mask.is_coalesced()
    dense = x.layout is torch.strided and not x.requires_grad and x.shape == mask.shape
    return by_rows and dense and any(entry.is_split for entry in x._spec.sbp)
