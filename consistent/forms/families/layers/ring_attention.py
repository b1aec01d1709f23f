"""Attention whose rows and keys are split alike, with any cut: no rank ever has all keys.

```
            step 0                  step 1                  step 2
rank 0      q0 x k0, v0             q0 x k1, v1             q0 x k2, v2        each result is joined
rank 1      q1 x k1, v1             q1 x k2, v2             q1 x k0, v0        with those before by
rank 2      q2 x k2, v2             q2 x k0, v0             q2 x k1, v1        its log-sum-exp
```

In each step a rank has the keys and values of one other rank. Backward goes round again: with the
log-sum-exp of all keys, each step's gradients are those of the whole, and those of keys and values
go to the rank that holds them. Under a causal mask runs of rows and of keys lie one wholly before
the other, or are the same: a rectangle, a triangle or nothing, and no mask is made. With
``S(d, cut="zigzag")`` each rank then has the same work in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirrored.transports.default import current

from ....movement import differentiable
from ....spec import Runs, S, TensorSpec, items_in
from ...registry import Shards, form

_aten = torch.ops.aten


@form("ring_attention")
def ring_attention(shard: Shards) -> Tensor:
    """``softmax(scale q k^T) v`` of rows and keys that are split alike."""
    query, key, value = (shard.get(name) for name in ("query", "key", "value"))
    scale = shard.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if shard.coordinate is None:
        return shard.run(query, key, value, scale=scale, enable_gqa=_has_groups(shard))
    return _Ring.apply(query, key, value, _plan(shard), scale)


@form("heads_attention")
def heads_attention(shard: Shards) -> Tensor:
    """Attention by an all-to-all to whole sequences of some heads, and one back."""
    at = S(shard.specs[0].ndim - 3)
    placed = [_with(spec, shard.axes, at) for spec in (*shard.specs, shard.outs[0])]
    query, key, value = (
        differentiable.box(x, have, want)
        for x, have, want in zip(shard.tensors, shard.specs, placed, strict=False)
    )
    out = shard.run(
        query, key, value, is_causal=shard.get("is_causal", False), scale=shard.get("scale"),
        enable_gqa=shard.get("enable_gqa", False),
    )  # fmt: skip
    return differentiable.box(out, placed[-1], shard.outs[0])


def _with(spec: TensorSpec, axes: Sequence[int], entry: Any) -> TensorSpec:
    return spec.with_sbp(tuple(entry if a in axes else e for a, e in enumerate(spec.sbp)))


def _has_groups(shard: Shards) -> bool:
    return bool(shard.get("enable_gqa", False))


@dataclass(frozen=True)
class _Plan:
    """Who holds which rows and keys."""

    ranks: tuple[int, ...]
    me: int  # this rank's place among them
    rows: Runs  # of this rank
    keys: tuple[Runs, ...]  # of each rank
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # keys and values of each rank
    causal: bool


def _plan(shard: Shards) -> _Plan:
    ranks = shard.ranks
    at = [shard.placement.coordinate_of(rank) for rank in ranks]
    keys, values = shard.specs[1:3]
    return _Plan(
        ranks,
        at.index(shard.coordinate),
        shard.specs[0].runs(shard.coordinate)[-2],
        tuple(keys.runs(c)[-2] for c in at),
        tuple((keys.local_shape(c), values.local_shape(c)) for c in at),
        bool(shard.get("is_causal", False)),
    )


def _blocks(plan: _Plan, source: int) -> Iterator[tuple[slice, slice, bool]]:
    """(rows of this rank, keys of rank ``source`` that they see, whether by a triangle)."""
    if not plan.causal:
        keys = items_in(plan.keys[source])
        if plan.rows and keys:
            yield slice(0, items_in(plan.rows)), slice(0, keys), False
        return
    first = 0
    for start, size in plan.rows:
        rows, seen = slice(first, first + size), 0
        for begin, length in plan.keys[source]:
            if begin == start:
                yield rows, slice(seen, seen + length), True
            if begin >= start:
                break
            seen += length
        if seen:
            yield rows, slice(0, seen), False
        first += size


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scale: float
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        total = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        for source, (keys, values) in _round(key, value, plan):
            for rows, seen, triangle in _blocks(plan, source):
                part, log = _attend(
                    query[..., rows, :], _heads(keys[..., seen, :], query),
                    _heads(values[..., seen, :], query), triangle, scale,
                )  # fmt: skip
                _join(out[..., rows, :], total[..., rows], part, log)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, total = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        wide = total.dtype
        of_query = torch.zeros_like(query, dtype=wide)
        of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for source, pair in _round(key, value, plan):
            given = [torch.zeros_like(x, dtype=wide) for x in pair]
            for rows, seen, triangle in _blocks(plan, source):
                keys, values = (_heads(x[..., seen, :], query) for x in pair)
                made = _attend_backward(
                    grad[..., rows, :], query[..., rows, :], keys, values, out[..., rows, :],
                    total[..., rows], triangle, scale,
                )  # fmt: skip
                of_query[..., rows, :] += made[0]
                for x, into in zip(made[1:], given, strict=True):
                    into[..., seen, :] += _of_groups(x, into.shape[-3])
            step = (source - plan.me) % len(plan.ranks)
            for x, into in zip(_returned(given, plan, step), (of_key, of_value), strict=True):
                into += x
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


# -- between ranks ---------------------------------------------------------------------------------


def _round(key: Tensor, value: Tensor, plan: _Plan) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """(rank, its keys and values) of one rank after the other, this rank first."""
    count = len(plan.ranks)
    yield plan.me, (key, value)
    mine = [key.contiguous(), value.contiguous()]
    for step in range(1, count):
        to, source = (plan.me - step) % count, (plan.me + step) % count
        receives = [(plan.ranks[source], shape, key.dtype) for shape in plan.shapes[source]]
        got = current().exchange(
            [(plan.ranks[to], x) for x in mine], receives, plan.ranks, key.device
        )
        yield source, (got[0], got[1])


def _returned(given: Sequence[Tensor], plan: _Plan, step: int) -> Sequence[Tensor]:
    """The gradients of this rank's keys and values, from the rank that has had them in a step."""
    if step == 0:
        return given
    count = len(plan.ranks)
    to, source = (plan.me + step) % count, (plan.me - step) % count
    receives = [(plan.ranks[source], shape, given[0].dtype) for shape in plan.shapes[plan.me]]
    sends = [(plan.ranks[to], x) for x in given]
    return current().exchange(sends, receives, plan.ranks, given[0].device)


# -- one block -------------------------------------------------------------------------------------


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """``x`` with a head for each head of the queries."""
    groups = query.shape[-3] // max(1, x.shape[-3])
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def _of_groups(x: Tensor, heads: int) -> Tensor:
    """The sum over the heads that share a key."""
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).sum(-3)


def _join(out: Tensor, total: Tensor, part: Tensor, log: Tensor) -> None:
    """Take the result for further keys into that for the keys so far, in place."""
    both = torch.logaddexp(total, log)
    out.mul_((total - both).exp().unsqueeze(-1)).add_(part * (log - both).exp().unsqueeze(-1))
    total.copy_(both)


def _by_kernel(query: Tensor, value: Tensor) -> bool:
    return query.is_cpu and query.ndim == 4 and query.shape[-1] == value.shape[-1]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp of each row)."""
    if _by_kernel(query, value):
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, triangle, scale=scale
        )
    scores = _scores(query, key, triangle, scale)
    log = scores.logsumexp(-1)
    return (scores - log.unsqueeze(-1)).exp().to(value.dtype) @ value, log


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    triangle: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, where ``out`` and ``total`` are those of all keys."""
    if _by_kernel(query, value):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), query, key, value, out, total, 0.0, triangle, scale=scale
        )
    chances = (_scores(query, key, triangle, scale) - total.unsqueeze(-1)).exp()
    grad, out = grad.to(chances.dtype), out.to(chances.dtype)
    inner = grad @ value.to(chances.dtype).mT - (grad * out).sum(-1, keepdim=True)
    of_scores = chances * inner * scale
    return (
        of_scores @ key.to(chances.dtype),
        of_scores.mT @ query.to(chances.dtype),
        chances.mT @ grad,
    )


def _scores(query: Tensor, key: Tensor, triangle: bool, scale: float) -> Tensor:
    scores = (query * scale) @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not triangle:
        return scores
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(ahead, -math.inf)
