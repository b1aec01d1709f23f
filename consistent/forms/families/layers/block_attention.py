"""Attention of a block of rows to a block of keys, with the log-sum-exp of each row.

The log-sum-exp is what joins the results for several blocks of keys into the result for all keys.
One of torch's kernels computes the block if a kernel supports it (``attention_kernels``). Otherwise
the block is computed a few rows at a time, so that no matrix of scores is large: with dropout, with
a mask that needs a gradient, and on GPUs with any bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_kernels import Mask, kernel_for

_SCORES = 1 << 22  # number of scores that are in memory at once

Drop = Callable[[Tensor, tuple[int, int]], Tensor]


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options for computing one block of attention: some rows and some keys.

    Args:
        scale: factor of the scores.
        triangle: the first row attends to the first key, and each row to one key more than the
            row before.
        bias: added to the scores; it has -inf where a row does not attend to a key.
        drop: takes probabilities and the logical position (row, key) of the first of them, and
            returns them after dropout.
        at: the logical position of the block's first row and key.
    """

    scale: float
    triangle: bool = False
    bias: Tensor | None = None
    drop: Drop | None = None
    at: tuple[int, int] = (0, 0)


class Grads(NamedTuple):
    """Gradients of query, key and value of a block of attention, and of its scores.

    That of the scores, after the bias was added, is also the gradient of a mask. It may be None if
    no mask needs a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None


def attend(query: Tensor, key: Tensor, value: Tensor, how: BlockOptions) -> tuple[Tensor, Tensor]:
    """Return (attention of the rows to the keys, log-sum-exp of each row) for one block.

    Where a row attends to no key, the result is zeros and the log-sum-exp is -inf.
    """
    mask = Mask(how.scale, how.triangle, how.bias)
    kernel = kernel_for(query, key, value, mask) if how.drop is None else None
    if kernel is not None:
        return kernel.forward(query, key, value, mask)
    parts = [
        _attend_rows(query[..., rows, :], key, value, part) for rows, part in _few(query, key, how)
    ]
    return torch.cat([out for out, _ in parts], -2), torch.cat([log for _, log in parts], -1)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, how: BlockOptions
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, how)
    log = scores.logsumexp(-1)
    chances = (scores - finite(log, 0.0).unsqueeze(-1)).exp()
    if how.drop is not None:
        chances = how.drop(chances, how.at)
    return chances.to(value.dtype) @ value, log


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    how: BlockOptions,
    of_scores: bool = False,
) -> Grads:
    """Return the gradients of one block of attention, from ``grad``, that of the rows' result.

    ``out`` and ``total`` are the rows' result and log-sum-exp over all keys, not only over the keys
    of this block. With ``of_scores`` the gradient of the scores is returned, too.
    """
    # exp(score - inf) is 0, so that a row that sees no key gets no gradient.
    total = finite(total, math.inf)
    mask = Mask(how.scale, how.triangle, how.bias)
    by_rows = how.drop is not None or of_scores
    kernel = None if by_rows else kernel_for(query, key, value, mask)
    if kernel is not None:
        return Grads(*kernel.backward(grad, query, key, value, out, total, mask), None)
    parts = [
        _rows_backward(
            grad[..., rows, :], query[..., rows, :], key, value, out[..., rows, :],
            total[..., rows], part,
        )
        for rows, part in _few(query, key, how)
    ]  # fmt: skip
    return Grads(
        torch.cat([part.query for part in parts], -2),
        sum((part.key for part in parts[1:]), parts[0].key),
        sum((part.value for part in parts[1:]), parts[0].value),
        torch.cat([part.scores for part in parts], -2) if of_scores else None,  # type: ignore[misc]
    )


def _rows_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    how: BlockOptions,
) -> Grads:
    chances = (_scores(query, key, how) - total.unsqueeze(-1)).exp()
    grad, out, query, key, value = (x.to(chances.dtype) for x in (grad, out, query, key, value))
    of_chances, kept = grad @ value.mT, chances
    if how.drop is not None:
        kept_part = how.drop(torch.ones_like(chances), how.at)
        of_chances, kept = of_chances * kept_part, chances * kept_part
    # ``out`` is the result for all keys, so (grad * out).sum is the softmax gradient's sum over all
    # keys, not only over the keys of this block.
    of_scores = chances * (of_chances - (grad * out).sum(-1, keepdim=True))
    return Grads(
        of_scores @ key * how.scale, of_scores.mT @ query * how.scale, kept.mT @ grad, of_scores
    )


def join(out: Tensor, total: Tensor, part: Tensor, log: Tensor) -> None:
    """Merge the result of a further block of keys into the result so far, in place.

    ``out`` and ``total`` are the result and log-sum-exp of the rows for the keys so far; ``part``
    and ``log`` those for the further keys.
    """
    both = torch.logaddexp(total, log)
    top = finite(both, 0.0)  # -inf - -inf would be NaN
    out.mul_((total - top).exp().unsqueeze(-1)).add_(part * (log - top).exp().unsqueeze(-1))
    total.copy_(both)


def finite(x: Tensor, otherwise: float) -> Tensor:
    """Return ``x`` with -inf replaced by ``otherwise``, so that differences do not become NaN."""
    return x.masked_fill(x == -math.inf, otherwise)


def heads_for(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of ``x``, keys or values, so that there is one for each head of ``query``.

    It serves grouped-query attention, which has fewer key heads than query heads.
    """
    groups = query.shape[-3] // max(1, x.shape[-3])
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def of_groups(x: Tensor, heads: int) -> Tensor:
    """Sum ``x`` over the query heads that share a key head, which leaves ``heads`` heads.

    ``x`` is a gradient of what ``heads_for`` returned.
    """
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).sum(-3)


def _few(query: Tensor, key: Tensor, how: BlockOptions) -> list[tuple[slice, BlockOptions]]:
    """Split the rows into parts with few enough scores to hold in memory.

    Returns (rows, options) of each part.
    """
    rows = query.shape[-2]
    lead = query.shape[:-2].numel() * max(1, key.shape[-2])
    step = max(1, _SCORES // max(1, lead))
    if rows <= step:
        return [(slice(0, rows), how)]
    return [(slice(a, min(a + step, rows)), _part(how, a, min(a + step, rows), key))
            for a in range(0, rows, step)]  # fmt: skip


def _part(how: BlockOptions, a: int, b: int, key: Tensor) -> BlockOptions:
    """Return the options ``how`` of a block, restricted to its rows from a to b."""
    bias = how.bias
    if bias is not None and bias.shape[-2] != 1:
        bias = bias[..., a:b, :]
    if how.triangle:
        sees = _triangle(b - a, key.shape[-2], a, key.device)
        bias = sees if bias is None else bias.masked_fill(sees == -math.inf, -math.inf)
    return BlockOptions(how.scale, False, bias, how.drop, (how.at[0] + a, how.at[1]))


def _scores(query: Tensor, key: Tensor, how: BlockOptions) -> Tensor:
    scores = (query * how.scale) @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if how.triangle:
        scores = scores + _triangle(*scores.shape[-2:], 0, scores.device)
    return scores if how.bias is None else scores + how.bias


def _triangle(rows: int, keys: int, first: int, device: torch.device) -> Tensor:
    """Return a causal bias [rows, keys]: 0 where key j is at most row ``first`` + i, else -inf."""
    ahead = torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + first)
    return torch.zeros(rows, keys, device=device).masked_fill_(ahead, -math.inf)
