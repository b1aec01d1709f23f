"""Forms of ops that go by position: a shard must know where in the whole it lies."""

from __future__ import annotations

import torch

from ..spec import Split
from .forms import Shards, form


@form("squeeze")
def squeeze(shard: Shards) -> torch.Tensor:
    """Drop the dims of logical size 1 asked for, and none of which this rank holds 1 of several."""
    (x,), (spec,) = shard.tensors, shard.specs
    dim = shard.get("dim")
    asked = (
        range(spec.ndim)
        if dim is None
        else [d % spec.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    )
    return x.squeeze(tuple(d for d in asked if spec.shape[d] == 1))


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


@form("triangle")
def triangle(shard: Shards) -> torch.Tensor:
    """tril, triu: element (i, j) of the shard is (i + top, j + left) of the whole."""
    *_, top, left = shard.box()[0]
    return shard.run(shard.tensors[0], shard.get("diagonal", 0) + top - left)


@form("trace")
def trace(shard: Shards) -> torch.Tensor:
    """The part of the diagonal that lies in the shard."""
    top, left = shard.box()[0]
    return shard.tensors[0].diagonal(top - left).sum(dtype=shard.outs[0].dtype)
