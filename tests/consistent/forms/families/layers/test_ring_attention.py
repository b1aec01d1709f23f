"""Attention of rows and keys that are cut alike: values and gradients are torch's, and no rank has
all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from tests.ranks import on_ranks

CUTS = ('S(2, cut="zigzag")', "S(2, blocks=2)", "S(2, of=4)")


def operands(rows: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    counts = (heads * groups, heads, heads)
    return [torch.randn(2, n, rows, 4, dtype=dtype) for n in counts]


def compare(given: list[Any], placement: Any, sbp: Any, seed: Any, **kwargs: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in given]
    want = F.scaled_dot_product_attention(*leaves, **kwargs)
    want.backward(seed)
    laid: list[Any] = [consistent.distribute(x, placement, sbp).requires_grad_() for x in given]
    attention: Any = F.scaled_dot_product_attention
    found = attention(*laid, **kwargs)
    found.backward(consistent.distribute(seed, placement, sbp))
    torch.testing.assert_close(found.full(), want)
    for x, leaf in zip(laid, leaves, strict=True):
        torch.testing.assert_close(x.grad.full(), leaf.grad)
    return found


def check(rank: int, n: int, heads: int, groups: int) -> None:
    line = consistent.placement("cpu", range(n))
    for rows, sbps in ((16, CUTS), (13, CUTS[:2]), (3, CUTS[:2])):
        given = operands(rows, heads, groups)
        seed = torch.randn_like(given[0])
        ragged = f"S(2, sizes={(rows - n + 1, *[1] * (n - 1))})"
        for sbp in (*sbps, ragged):
            for causal in (True, False):
                found = compare(
                    given, line, sbp, seed, is_causal=causal, enable_gqa=groups > 1
                )  # fmt: skip
                assert str(found.sbp[0]) == sbp


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (1, 3), (5, 1)])
@on_ranks(2, 3, 4)
def test_values_and_gradients(rank: int, heads: int, groups: int) -> None:
    check(rank, torch.distributed.get_world_size(), heads, groups)
