"""Forms of ops that go by position: a shard must know where in the whole it lies."""

from __future__ import annotations

import torch

from ...rules.layout.shape import squeezed_dims
from ...spec import Split
from ..registry import Shards, form


@form("squeeze")
def squeeze(shard: Shards) -> torch.Tensor:
    """Drop those of the given dims that have logical size 1, not those that only the shard has 1
    of."""
    (x,), (spec,) = shard.tensors, shard.specs
    return x.squeeze(tuple(d for d in squeezed_dims(shard.call) if spec.shape[d] == 1))


@form("meshgrid")
def meshgrid(shard: Shards) -> tuple[torch.Tensor, ...]:
    """Output i repeats vector i, and has no value of the others."""
    made = []
    for i, x in enumerate(shard.tensors):
        at = next(e.dim for e in shard.outs[i].sbp if isinstance(e, Split))
        shape = [1] * len(shard.outs)
        shape[at] = -1
        made.append(x.reshape(shape).expand(shard.out_shape(i)))
    return tuple(made)


@form("triangular")
def triangular(shard: Shards) -> torch.Tensor:
    """tril, triu: element (i, j) of the shard is (i + top, j + left) of the whole."""
    *_, top, left = shard.region()[0]
    return shard.run(shard.tensors[0], shard.get("diagonal", 0) + top - left)
