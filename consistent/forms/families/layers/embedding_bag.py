"""Form of embedding_bag, whose table may be split by rows or by columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ....rules.families.layers.embedding_bag import MAX, MEAN
from ....rules.signature import is_split
from ...refused import need_in_range
from ...registry import Shards, form


@form("embedding_bag")
def _bag(shard: Shards) -> tuple[tuple[Tensor, ...], list[tuple[int, ...]]]:
    """Run embedding_bag on the shard, and return (its four outputs, their logical shapes)."""
    if any(is_split(shard.specs[0].sbp[a], 0) for a in shard.axes):
        made = _of_rows(shard)
    else:
        made = shard.run(*shard.args, **shard.kwargs)
    columns = shard.specs[0].shape[1]
    shapes = [(len(made[0]), columns), *(tuple(t.shape) for t in made[1:])]
    if shard.get("mode", 0) == MAX:
        shapes[3] = (len(made[3]), columns)
    return made, shapes


def _of_rows(shard: Shards) -> tuple[Tensor, ...]:
    """Run embedding_bag on a table that is split by rows.

    Rows of other ranks count as zero, so the bags are addends of the result.
    """
    weight, index, offsets = (shard.get(name) for name in ("weight", "indices", "offsets"))
    start, n, total = shard.region()[0][0], shard.region()[1][0], shard.specs[0].shape[0]
    need_in_range(index, total, shard.call.name)
    last, padding = bool(shard.get("include_last_offset", False)), shard.get("padding_idx")
    outside = (index < start) | (index >= start + n)
    counted = torch.ones_like(outside) if padding is None else index != padding % total
    each = shard.get("per_sample_weights")
    each = weight.new_ones(()).expand(index.shape) if each is None else each
    # Rows of other ranks and padding look up a spare row, which is the kernel's padding index.
    spare = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    local = (index - start).masked_fill(outside | ~counted, n)
    out, *rest = torch.embedding_bag(
        spare, local, offsets, False, 0, False, each.contiguous(), last, n
    )
    if shard.get("mode", 0) == MEAN:
        # The kernel only knows this rank's rows, so the mean divides by the full bag sizes here.
        before = torch.cat([counted.new_zeros(1, dtype=torch.int64), counted.cumsum(0)])
        ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_full((1,), len(index))])
        sizes = before[ends] - before[offsets[: len(ends)]]
        out = out / sizes.clamp_min(1).unsqueeze(1)
        rest[1] = rest[2] = sizes.to(index.dtype)
    return (out, *rest)
