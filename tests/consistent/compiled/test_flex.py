"""Steps with ``flex_attention`` are programs under every layout, with the values and gradients of
attention as its functions define it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks

attention: Any = flex_attention
ROWS, HEADS = 20, 4
LAYOUTS = (S(0), S(1), S(2), S(2, cut="zigzag"), B)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(ROWS)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores + (places - places.unsqueeze(1)) * torch.arange(HEADS).view(-1, 1, 1) / 8
    return scores.masked_fill(places > places.unsqueeze(1), -torch.inf).softmax(-1) @ v


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + (k - q) * h / 8


@pytest.mark.parametrize("backend", ["ops", "inductor"])
@on_ranks(2, timeout=240)
def test_a_step_is_a_program(rank: int, backend: Any) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, HEADS, ROWS, 8, dtype=torch.float64) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in given]
    want = written_out(*leaves)
    want.square().sum().backward()
    mask = create_block_mask(causal, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=4)

    @consistent.compile(backend=backend)
    def step(*laid: Any) -> Any:
        out = attention(*laid, alibi, mask)
        out.square().sum().backward()
        return out

    for sbp in LAYOUTS if backend == "ops" else LAYOUTS[2:4]:
        for _ in range(3):
            laid = [consistent.distribute(x, Placement.all("cpu"), sbp) for x in given]
            laid = [x.requires_grad_() for x in laid]
            found = step(*laid)
        pairs = [(found.full(), want), *((x.grad.full(), y.grad) for x, y in zip(laid, leaves))]
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert all(each.program is not None for each in step.programs), step.show()
