"""Forms of shape ops for which a shard must know its position in the logical tensor."""

from __future__ import annotations

import torch

from ...rules.layout.shape import squeezed_dims
from ...spec import Split
from ..registry import Shards, form


@form("squeeze")
def squeeze(shard: Shards) -> torch.Tensor:
    """Run squeeze: drop the named dims that have size 1 in the logical tensor.

    A dim that has size 1 only in the shard stays.
    """
    (x,), (spec,) = shard.tensors, shard.specs
    return x.squeeze(tuple(d for d in squeezed_dims(shard.call) if spec.shape[d] == 1))


@form("meshgrid")
def meshgrid(shard: Shards) -> tuple[torch.Tensor, ...]:
    """Run meshgrid: expand this rank's part of vector i along the other dims of output i.

    No values of other ranks are needed.
    """
    outputs = []
    for i, x in enumerate(shard.tensors):
        dim = next(e.dim for e in shard.outs[i].sbp if isinstance(e, Split))
        shape = [1] * len(shard.outs)
        shape[dim] = -1
        outputs.append(x.reshape(shape).expand(shard.out_shape(i)))
    return tuple(outputs)


@form("triangular")
def triangular(shard: Shards) -> torch.Tensor:
    """Run tril or triu with the diagonal shifted for this shard.

    Element (i, j) of the shard is element (i + top, j + left) of the logical matrix, so the
    diagonal shifts by top - left.
    """
    *_, top, left = shard.region()[0]
    return shard.run(shard.tensors[0], shard.get("diagonal", 0) + top - left)
