"""Attention with dropout of ours: the mask is a function of the logical index of each
probability."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..spec import TensorSpec
from . import _native
from .forms import Shards, form
from .random import key_from


@form("attention")
def attention(shard: Shards) -> Tensor:
    """``softmax(scale q k^T + mask) v``, with probabilities dropped if ``dropout_p`` says so."""
    p = shard.get("dropout_p", 0.0)
    if p == 0:
        return shard.run(*shard.args, **shard.kwargs)
    key = key_from(None)
    query, keys, values = (shard.get(name) for name in ("query", "key", "value"))
    if shard.get("enable_gqa", False) and keys.shape[-3]:
        keys = keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3)
        values = values.repeat_interleave(query.shape[-3] // values.shape[-3], -3)
    scale = shard.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _biased(shard, (query * scale) @ keys.transpose(-2, -1))
    chances = scores.softmax(-1)
    # A row that may look nowhere gives zeros, as in torch.
    chances = (
        chances.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
        if scores.shape[-1]
        else chances
    )
    starts, sizes = _logical(shard.outs[0], shard, chances.shape[-1])
    chances = chances.expand(*shard.out_shape()[:-1], chances.shape[-1])
    dropped = _native.dropout(
        chances, p, seed=key.seed, counter=key.counter, starts=starts, logical_sizes=sizes
    )
    return dropped @ values


def _biased(shard: Shards, scores: Tensor) -> Tensor:
    """Scores with the mask added, or minus infinity where it is False or where a row would look
    ahead."""
    mask = shard.get("attn_mask")
    if shard.get("is_causal", False):
        rows, columns = scores.shape[-2:]
        ahead = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


def _logical(out: TensorSpec, shard: Shards, keys: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, logical sizes) of the probabilities, which are laid out as the result but for their
    last dim."""
    starts = out.box(shard.here)[0]
    return (*starts[:-1], 0), (*out.shape[:-1], keys)
