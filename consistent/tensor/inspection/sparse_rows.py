"""``x.sparse_mask(mask)`` for a sharded ``x`` and a ``mask`` that is sparse along dim 0 only.

Optimizers read their state this way at the rows of a sparse gradient. Only these rows are sent, not
the rest of ``x``.
"""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.plans.shards import is_global
from ...dispatch.running.whole_call import call_whole


def sparse_mask(x: Any, mask: Any) -> Any:
    """Implement ``Tensor.sparse_mask``: the entries of ``x`` at the indices of ``mask``, as B.

    If ``x`` is split and ``mask`` selects whole rows, only these rows are sent; otherwise the op
    runs on whole tensors.
    """
    if not _selects_whole_rows(x, mask):
        return call_whole("sparse_mask", torch.Tensor.sparse_mask, (x, mask), {})
    indices = mask._indices()
    rows = x.index_select(0, indices[0])
    return torch.sparse_coo_tensor(
        indices, rows, x.shape, check_invariants=False, is_coalesced=True
    )


def _selects_whole_rows(x: Any, mask: Any) -> bool:
    """Return whether the entries at ``mask`` are whole rows of ``x``, a dense and split tensor."""
    if not is_global(x) or not is_global(mask) or x._spec.placement != mask._spec.placement:
        return False
    by_rows = mask.layout is torch.sparse_coo and mask.sparse_dim() == 1 and mask.is_coalesced()
    dense = x.layout is torch.strided and not x.requires_grad and x.shape == mask.shape
    return by_rows and dense and any(entry.is_split for entry in x._spec.sbp)
