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

_MAX_SCORES = 1 << 22  # number of scores that are in memory at once

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
        position: the logical position of the block's first row and key.
    """

    scale: float
    triangle: bool = False
    bias: Tensor | None = None
    drop: Drop | None = None
    position: tuple[int, int] = (0, 0)


class Grads(NamedTuple):
    """Gradients of query, key and value of a block of attention, and of its scores.

    That of the scores, after the bias was added, is also the gradient of a mask. It may be None if
    no mask needs a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: BlockOptions
) -> tuple[Tensor, Tensor]:
    """Return (attention of the rows to the keys, log-sum-exp of each row) for one block.

    Where a row attends to no key, the result is zeros and the log-sum-exp is -inf.
    """
    mask = Mask(options.scale, options.triangle, options.bias)
    kernel = kernel_for(query, key, value, mask) if options.drop is None else None
    if kernel is not None:
        return kernel.forward(query, key, value, mask)
    parts = [
        _attend_rows(query[..., rows, :], key, value, part)
        for rows, part in _split_rows(query, key, options)
    ]
    return torch.cat([out for out, _ in parts], -2), torch.cat([log for _, log in parts], -1)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, options: BlockOptions
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, options)
    log = scores.logsumexp(-1)
    probabilities = (scores - replace_inf(log, 0.0).unsqueeze(-1)).exp()
    if options.drop is not None:
        probabilities = options.drop(probabilities, options.position)
    return probabilities.to(value.dtype) @ value, log


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    options: BlockOptions,
    with_score_grad: bool = False,
) -> Grads:
    """Return the gradients of one block of attention, from ``grad``, that of the rows' result.

    ``out`` and ``total`` are the rows' result and log-sum-exp over all keys, not only over the keys
    of this block. With ``with_score_grad`` the gradient of the scores is returned, too.
    """
    # exp(score - inf) is 0, so that a row that sees no key gets no gradient.
    total = replace_inf(total, math.inf)
    mask = Mask(options.scale, options.triangle, options.bias)
    by_rows = options.drop is not None or with_score_grad
    kernel = None if by_rows else kernel_for(query, key, value, mask)
    if kernel is not None:
        return Grads(*kernel.backward(grad, query, key, value, out, total, mask), None)
    parts = [
        _rows_backward(
            grad[..., rows, :], query[..., rows, :], key, value, out[..., rows, :],
            total[..., rows], part,
        )
        for rows, part in _split_rows(query, key, options)
    ]  # fmt: skip
    return Grads(
        torch.cat([part.query for part in parts], -2),
        sum((part.key for part in parts[1:]), parts[0].key),
        sum((part.value for part in parts[1:]), parts[0].value),
        torch.cat([part.scores for part in parts], -2) if with_score_grad else None,  # type: ignore[misc]
    )


def _rows_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    options: BlockOptions,
) -> Grads:
    probabilities = (_scores(query, key, options) - total.unsqueeze(-1)).exp()
    grad, out, query, key, value = (
        x.to(probabilities.dtype) for x in (grad, out, query, key, value)
    )
    grad_probabilities, dropped_probabilities = grad @ value.mT, probabilities
    if options.drop is not None:
        keep_mask = options.drop(torch.ones_like(probabilities), options.position)
        grad_probabilities, dropped_probabilities = (
            grad_probabilities * keep_mask,
            probabilities * keep_mask,
        )
    # ``out`` is the result for all keys, so (grad * out).sum is the softmax gradient's sum over all
    # keys, not only over the keys of this block.
    grad_scores = probabilities * (grad_probabilities - (grad * out).sum(-1, keepdim=True))
    return Grads(
        grad_scores @ key * options.scale,
        grad_scores.mT @ query * options.scale,
        dropped_probabilities.mT @ grad,
        grad_scores,
    )


def merge_block(out: Tensor, total: Tensor, part: Tensor, log: Tensor) -> None:
    """Merge the result of a further block of keys into the result so far, in place.

    ``out`` and ``total`` are the result and log-sum-exp of the rows for the keys so far; ``part``
    and ``log`` those for the further keys.
    """
    new_total = torch.logaddexp(total, log)
    top = replace_inf(new_total, 0.0)  # -inf - -inf would be NaN
    out.mul_((total - top).exp().unsqueeze(-1)).add_(part * (log - top).exp().unsqueeze(-1))
    total.copy_(new_total)


def replace_inf(x: Tensor, otherwise: float) -> Tensor:
    """Return ``x`` with -inf replaced by ``otherwise``, so that differences do not become NaN."""
    return x.masked_fill(x == -math.inf, otherwise)


def repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of ``x``, keys or values, so that there is one for each head of ``query``.

    It serves grouped-query attention, which has fewer key heads than query heads.
    """
    groups = query.shape[-3] // max(1, x.shape[-3])
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def sum_head_groups(x: Tensor, heads: int) -> Tensor:
    """Sum ``x`` over the query heads that share a key head, which leaves ``heads`` heads.

    ``x`` is a gradient of what ``repeat_heads`` returned.
    """
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).sum(-3)


def _split_rows(
    query: Tensor, key: Tensor, options: BlockOptions
) -> list[tuple[slice, BlockOptions]]:
    """Split the rows into parts with few enough scores to hold in memory.

    Returns (rows, options) of each part.
    """
    rows = query.shape[-2]
    lead = query.shape[:-2].numel() * max(1, key.shape[-2])
    step = max(1, _MAX_SCORES // max(1, lead))
    if rows <= step:
        return [(slice(0, rows), options)]
    return [(slice(a, min(a + step, rows)), _options_for_rows(options, a, min(a + step, rows), key))
            for a in range(0, rows, step)]  # fmt: skip


def _options_for_rows(options: BlockOptions, a: int, b: int, key: Tensor) -> BlockOptions:
    """Return the ``options`` of a block, restricted to its rows from a to b."""
    bias = options.bias
    if bias is not None and bias.shape[-2] != 1:
        bias = bias[..., a:b, :]
    if options.triangle:
        causal_bias = _causal_bias(b - a, key.shape[-2], a, key.device)
        bias = (
            causal_bias if bias is None else bias.masked_fill(causal_bias == -math.inf, -math.inf)
        )
    return BlockOptions(
        options.scale, False, bias, options.drop, (options.position[0] + a, options.position[1])
    )


def _scores(query: Tensor, key: Tensor, options: BlockOptions) -> Tensor:
    scores = (query * options.scale) @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if options.triangle:
        scores = scores + _causal_bias(*scores.shape[-2:], 0, scores.device)
    return scores if options.bias is None else scores + options.bias


def _causal_bias(rows: int, keys: int, first: int, device: torch.device) -> Tensor:
    """Return a causal bias [rows, keys]: 0 where key j is at most row ``first`` + i, else -inf."""
    ahead = torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + first)
    return torch.zeros(rows, keys, device=device).masked_fill_(ahead, -math.inf)
