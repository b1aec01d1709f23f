"""``F.embedding_bag`` for bags of equal length that one mesh axis splits along with the table.

The rows are looked up first and then summed bag by bag, so that each row that a rank lacks is sent
to it once. Torch's own Python body would flatten all bags into one row, with the start of each bag
as a value in a tensor, which planning cannot see.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ....spec import Split
from ...plans.shards import is_global


def embedding_bag(
    input: Any,  # noqa: A002
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Compute ``F.embedding_bag`` as a lookup of rows and a reduction of each bag.

    The parameters are those of torch. For ``mode="sum"`` without other options it computes
    ``F.embedding(input, weight).sum(1)``. Returns ``NotImplemented``, so that torch's own Python
    body is run instead, for options that this does not support, and if no axis splits both the bags
    and the table.
    """
    has_no_options = max_norm is None and not scale_grad_by_freq and offsets is None
    averages = mode == "mean" and per_sample_weights is None
    if (
        not has_no_options
        or not (mode == "sum" or averages)
        or not _are_split_together(input, weight)
    ):
        return NotImplemented
    try:
        rows = F.embedding(input, weight, padding_idx, sparse=sparse)
    # A row out of range raises on every rank; for bags torch raises a RuntimeError instead.
    except IndexError as error:
        raise RuntimeError(f"embedding_bag, by rows: {error}") from error
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    mask = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    total = rows.where(mask, 0).sum(1)
    return total if mode == "sum" else total / mask.sum(1).clamp_min(1)


def _are_split_together(bags: Any, table: Any) -> bool:
    """Return whether some axis splits both the bags along dim 0 and the rows of the table.

    ``bags`` must be 2-d, with one bag per row.
    """
    if not is_global(bags) or not is_global(table) or bags.ndim != 2 or not bags.shape[1]:
        return False
    if bags._spec.placement != table._spec.placement:
        return False
    pairs = zip(bags._spec.sbp, table._spec.sbp, strict=True)
    return any(isinstance(a, Split) and a == b == Split(0) for a, b in pairs)
