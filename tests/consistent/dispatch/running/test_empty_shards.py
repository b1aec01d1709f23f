"""Gradients of whole operands, such as weights, where a rank's part of the batch is empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, Placement, S
from tests.ranks import pool
from tests.twins import randn

_ATTENTION = F.scaled_dot_product_attention
# The call, the sizes of what is split by its first dim, which has two items, and of what is whole.
CASES: dict[str, tuple[Callable[..., Any], list, list]] = {
    "linear": (F.linear, [(2, 4)], [(3, 4), (3,)]),
    "bilinear": (F.bilinear, [(2, 4), (2, 3)], [(5, 4, 3), (5,)]),
    "conv1d": (F.conv1d, [(2, 3, 6)], [(4, 3, 2), (4,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 3, 6)], [(3, 4, 2), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(2, 4)], [(4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [(2, 4)], [(4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3)], [(4,), (4,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), w, b),
        [(2, 4)],
        [(4,), (4,)],
    ),
    "prelu": (F.prelu, [(2, 4)], [(4,)]),
    "baddbmm": (torch.baddbmm, [(2, 3, 4), (2, 3, 5), (2, 5, 4)], []),
    "addmm": (lambda x, b, w: torch.addmm(b, x, w), [(2, 4)], [(3,), (4, 3)]),
    "where": (lambda x, w: torch.where(x > 0, x, w), [(2, 4)], [(4,)]),
    "attention, mask": (
        lambda q, k, v, m: _ATTENTION(q, k, v, attn_mask=m),
        [(2, 2, 4, 8)] * 3,
        [(4, 4)],
    ),
    "attention, mask by position": (_ATTENTION, [(2, 2, 4, 8)] * 3, [(2, 4, 4)]),
    "attention, keys": (
        lambda q, k, v: _ATTENTION(q, k.expand(2, 2, 4, 8), v.expand(2, 2, 4, 8)),
        [(2, 2, 4, 8)],
        [(2, 4, 8), (2, 4, 8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_without_rows_take_part_in_gradients(name: str) -> None:
    pool(3).run(_take_part, name)


def _take_part(rank: int, name: str) -> None:
    run, rows, weights = CASES[name]
    p = Placement.all("cpu")
    given = [(randn(*each), S(0)) for each in rows] + [(randn(*each), B) for each in weights]
    plain = [x.clone().requires_grad_() for x, _ in given]
    laid = [consistent.distribute(x, p, sbp).requires_grad_() for x, sbp in given]
    for leaves in (plain, laid):
        (run(*leaves) ** 2).sum().backward()
    for x, y in zip(laid, plain, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad.full(), y.grad)
