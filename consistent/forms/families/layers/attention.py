"""Form of attention that depends on positions: rows under a causal mask, split keys, dropout.

With split keys, each rank attends to its own keys. The ranks join the maximum and the sum of
exponentials of each row of the softmax, and each rank then has an addend of the result. Dropout is
done here, not by torch's kernel: the mask is a function of the logical index of each probability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....movement import differentiable
from ....spec import S
from ...native import load
from ...random.draw import key_of
from ...registry import Shards, form


@form("attention")
def attention(shard: Shards) -> Tensor:
    """Compute ``softmax(scale q k^T + mask) v`` on this rank's rows and keys.

    Probabilities are dropped if ``dropout_p`` is not 0. With split keys the result is an addend.
    """
    p, axes = shard.get("dropout_p", 0.0), _key_axes(shard)
    if p == 0 and not axes:
        return _run_fused_kernel(shard)
    query, keys, values = (shard.get(name) for name in ("query", "key", "value"))
    if shard.get("enable_gqa", False) and keys.shape[-3]:
        keys = keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3)
        values = values.repeat_interleave(query.shape[-3] // values.shape[-3], -3)
    scale = shard.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ keys.transpose(-2, -1)
    # In float32, as in torch's kernels: half-precision sums of exponentials would lose small terms.
    scores = _apply_masks(shard, scores.float() if scores.dtype.itemsize < 4 else scores)
    probabilities = _joined_softmax(shard, scores, axes).to(values.dtype)
    return (_apply_dropout(shard, probabilities, p) if p else probabilities) @ values


def _key_axes(shard: Shards) -> tuple[int, ...]:
    """Return the placement axes that split the keys, over which the softmax must be joined."""
    spec = shard.specs[1]
    return tuple(a for a, entry in enumerate(spec.sbp) if entry is S(spec.ndim - 2))


def _run_fused_kernel(shard: Shards) -> Tensor:
    """Run torch's own attention kernel on this rank's rows, without dropout and with all keys.

    Under a causal mask row i of the shard is row ``first`` + i of the logical tensor, and attends
    to the keys up to that index. Torch's ``is_causal`` says this only for the first shard, so later
    ones get an explicit mask.
    """
    first = shard.region(0)[0][-2]
    if not first or not shard.get("is_causal", False):
        return shard.run(*shard.args, **shard.kwargs)
    query, keys, values = (shard.get(name) for name in ("query", "key", "value"))
    # Leave out the keys that no row sees.
    count = min(keys.shape[-2], first + query.shape[-2])
    causal_mask = torch.ones(query.shape[-2], count, dtype=torch.bool, device=query.device).tril(
        first
    )
    return shard.run(
        query, keys.narrow(-2, 0, count), values.narrow(-2, 0, count), attn_mask=causal_mask,
        scale=shard.get("scale"), enable_gqa=shard.get("enable_gqa", False),
    )  # fmt: skip


def _apply_masks(shard: Shards, scores: Tensor) -> Tensor:
    """Return ``scores`` with ``attn_mask`` and the causal mask applied.

    A score is -inf where a boolean mask is False, and for keys after the position of a causal row.
    """
    mask = shard.get("attn_mask")
    if shard.get("is_causal", False):
        rows, columns = scores.shape[-2:]
        ones = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
        offset = shard.region(0)[0][-2] - shard.region(1)[0][-2]
        scores = scores.masked_fill(ones.triu(1 + offset), -math.inf)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


def _joined_softmax(shard: Shards, scores: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compute the softmax over the last dim, which ``axes`` split.

    The ranks join the maximum and the sum of each row. A row that attends to no key gives zeros, as
    in torch.
    """
    with torch.no_grad():
        lowest = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        top = torch.cat([scores, lowest], -1).amax(-1, keepdim=True)
        top = differentiable.max_over(top, shard.placement, axes) if axes else top
        top = top.masked_fill(top == -math.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    total = differentiable.sum_over(total, shard.placement, axes) if axes else total
    return weights / total.masked_fill(total == 0, 1.0)


def _apply_dropout(shard: Shards, probabilities: Tensor, p: float) -> Tensor:
    """Apply dropout to each of the ``probabilities`` by its logical index.

    Probabilities have the layout of the result, except for the last dim, which is that of the keys.
    """
    key, out = key_of(shard), shard.outs[0]
    starts, columns = out.region(shard.coordinate)[0], shard.region(1)[0][-2]
    logical = (*out.shape[:-1], shard.specs[1].shape[-2])
    probabilities = probabilities.expand(*shard.out_shape()[:-1], probabilities.shape[-1])
    return load.dropout(
        probabilities, p, seed=key.seed, counter=key.counter, starts=(*starts[:-1], columns),
        logical_sizes=logical,
    )  # fmt: skip
