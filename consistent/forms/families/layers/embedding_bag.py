"""Form of embedding_bag, whose table may be split by rows or by columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ....rules.families.layers.embedding_bag import MAX, MEAN
from ....rules.signature import is_split
from ...refused import require_in_range
from ...registry import Shards, form


@form("embedding_bag")
def _embedding_bag(shard: Shards) -> tuple[tuple[Tensor, ...], list[tuple[int, ...]]]:
    """Run embedding_bag on the shard, and return (its four outputs, their logical shapes)."""
    if any(is_split(shard.specs[0].sbp[a], 0) for a in shard.axes):
        outputs = _bags_of_split_rows(shard)
    else:
        outputs = shard.run(*shard.args, **shard.kwargs)
    columns = shard.specs[0].shape[1]
    shapes = [(len(outputs[0]), columns), *(tuple(t.shape) for t in outputs[1:])]
    if shard.get("mode", 0) == MAX:
        shapes[3] = (len(outputs[3]), columns)
    return outputs, shapes


def _bags_of_split_rows(shard: Shards) -> tuple[Tensor, ...]:
    """Run embedding_bag on a table that is split by rows.

    Rows of other ranks count as zero, so the bags are addends of the result.
    """
    weight, index, offsets = (shard.get(name) for name in ("weight", "indices", "offsets"))
    start, n, total = shard.region()[0][0], shard.region()[1][0], shard.specs[0].shape[0]
    require_in_range(index, total, shard.call.name)
    has_last, padding = bool(shard.get("include_last_offset", False)), shard.get("padding_idx")
    outside = (index < start) | (index >= start + n)
    is_counted = torch.ones_like(outside) if padding is None else index != padding % total
    sample_weights = shard.get("per_sample_weights")
    sample_weights = (
        weight.new_ones(()).expand(index.shape) if sample_weights is None else sample_weights
    )
    # Rows of other ranks and padding look up a spare row, which is the kernel's padding index.
    padded_weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    local = (index - start).masked_fill(outside | ~is_counted, n)
    out, *rest = torch.embedding_bag(
        padded_weight, local, offsets, False, 0, False, sample_weights.contiguous(), has_last, n
    )
    if shard.get("mode", 0) == MEAN:
        # The kernel only knows this rank's rows, so the mean divides by the full bag sizes here.
        counts_before = torch.cat(
            [is_counted.new_zeros(1, dtype=torch.int64), is_counted.cumsum(0)]
        )
        ends = (
            offsets[1:]
            if has_last
            else torch.cat([offsets[1:], offsets.new_full((1,), len(index))])
        )
        sizes = counts_before[ends] - counts_before[offsets[: len(ends)]]
        out = out / sizes.clamp_min(1).unsqueeze(1)
        rest[1] = rest[2] = sizes.to(index.dtype)
    return (out, *rest)
