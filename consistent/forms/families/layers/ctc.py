"""Form of ctc_loss where the samples of the batch are split.

Each rank computes the losses of its own samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....rules.notation import MEAN, NONE
from ...registry import Shards, form
from ...whole_numbers import read_ints


@form("ctc_loss")
def _ctc(shard: Shards) -> Tensor:
    """Return the CTC losses of this rank's samples or, for a sum or mean, this rank's addend.

    A sum or mean is P. A mean divides each loss by its target's length and by the logical number of
    samples.
    """
    x, targets, reduction = shard.tensors[0], shard.get("targets"), shard.get("reduction", MEAN)
    lengths, sizes = (_lengths_as_ints(shard.get(f"{n}_lengths")) for n in ("input", "target"))
    start, count = shard.region()[0][1], shard.region()[1][1]
    if targets.ndim == 1:
        targets = targets.narrow(0, sum(sizes[:start]), sum(sizes[start : start + count]))
    lengths, sizes = lengths[start : start + count], sizes[start : start + count]
    if count and shard.coordinate is not None:
        losses = torch.ctc_loss(
            x,
            targets,
            lengths,
            sizes,
            shard.get("blank", 0),
            NONE,
            shard.get("zero_infinity", False),
        )
    else:
        # One number per sample, with an autograd graph as on the other ranks.
        losses = x.sum((0, 2))
    if reduction == NONE:
        return losses
    if reduction == MEAN:
        target_lengths = losses.new_tensor(sizes).clamp_min(1)
        losses = losses / target_lengths / shard.specs[0].shape[1]
    return losses.sum()


def _lengths_as_ints(lengths: Any) -> list[int]:
    if not isinstance(lengths, Tensor):
        return list(lengths)
    return [0] * len(lengths) if lengths.is_meta else read_ints(lengths)
