"""Attention of rows that are cut in the dtypes that models are trained in: whatever travels, keys
and gradients back, has one dtype on both ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent import S
from tests.consistent.forms.families.layers import test_flex_attention as flexible
from tests.consistent.forms.families.layers import test_packed_attention as packed
from tests.consistent.forms.families.layers import test_ring_attention as ring
from tests.ranks import on_ranks

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(made: list[Any], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Results and gradients, which have the dtype of what they belong to."""
    for x, y in zip(made, wanted, strict=True):
        assert x.dtype == dtype
        room = TOLERANCES[dtype] * (1 + y.abs().max())
        assert (x.full().double() - y).abs().max() <= room


def laid_out(given: list[Tensor], sbp: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
    """(the values in float64, global tensors of ``dtype``), to be differentiated."""
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    held = [x.to(dtype) for x in given]
    exact = [x.double().requires_grad_() for x in held]
    return exact, [consistent.distribute(x, line, sbp).requires_grad_() for x in held]


def gradients(out: Any, leaves: list[Any]) -> list[Any]:
    return list(torch.autograd.grad(out.square().sum(), leaves))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@on_ranks(2, 3)
def test_a_ring(rank: int, dtype: torch.dtype) -> None:
    attention: Any = F.scaled_dot_product_attention
    for sbp in (*ring.CUTS, "S(2, of=16)"):
        for kwargs in ({"is_causal": True}, {}, {"attn_mask": ring.masks(16)[0]}):
            exact, laid = laid_out(ring.operands(16, 2, 1), sbp, dtype)
            wanted, made = (attention(*x, **kwargs) for x in (exact, laid))
            close([made, *gradients(made, laid)], [wanted, *gradients(wanted, exact)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@on_ranks(2, 3)
def test_documents(rank: int, dtype: torch.dtype) -> None:
    starts = packed.starts((5, 9, 3))
    for sbp in (packed.ZIGZAG, S(0)):
        exact, laid = laid_out(packed.operands(17, 17, 2, 1), sbp, dtype)
        wanted, _ = packed.plain(exact, starts, starts, (-1, 0))
        made = packed.attention(*laid, starts, starts, 9, 9, window_size=(-1, 0))
        close([made, *gradients(made, laid)], [wanted, *gradients(wanted, exact)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@on_ranks(2, 3)
def test_flex(rank: int, dtype: torch.dtype) -> None:
    for sbp in (S(2), S(2, cut="zigzag")):
        exact, laid = laid_out(flexible.operands(1), sbp, dtype)
        wanted, _ = flexible.plain(exact, flexible.soft_cap, flexible.causal)
        mask = flexible.block_mask(flexible.causal)
        made = flexible.attention(*laid, score_mod=flexible.soft_cap, block_mask=mask)
        close([made, *gradients(made, laid)], [wanted, *gradients(wanted, exact)], dtype)
