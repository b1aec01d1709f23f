"""Layers that hold several others, one after the other, under the plan of tensor: each rank has a
piece of each, and taking them apart sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, S
from tests.ranks import pool

HEADS, WIDTH = 6, 4
DIM = HEADS * WIDTH
Apart = Callable[[Tensor, list[int]], list[Tensor]]


def _slices(x: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [x[..., a:b] for a, b in zip(ends, ends[1:])]


def _view(x: Tensor, sizes: list[int]) -> list[Tensor]:
    parts = x.view(*x.shape[:-1], len(sizes), sizes[0])
    return [parts.select(-2, k) for k in range(len(sizes))]


WAYS: dict[str, Apart] = {
    "split": lambda x, sizes: list(x.split(sizes, -1)),
    "slices": _slices,
    "chunk": lambda x, sizes: list(x.chunk(len(sizes), -1)),
    "view": _view,
}


class Attention(nn.Module):
    def __init__(self, keys: int, apart: Apart) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.apart = HEADS, keys, apart
        self.sizes = [DIM, keys * WIDTH, keys * WIDTH]
        self.qkv_proj = nn.Linear(DIM, sum(self.sizes))
        self.o_proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found = self.apart(self.qkv_proj(x), self.sizes)
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in found)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, apart: Apart) -> None:
        super().__init__()
        self.apart = apart
        self.gate_up_proj = nn.Linear(DIM, 2 * 36)
        self.down_proj = nn.Linear(36, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.apart(self.gate_up_proj(x), [36, 36])
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, keys: int, apart: Apart) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(keys, apart), Mlp(apart)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x))


def _compared(rank: int, way: str, keys: int) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    plain = Block(keys, WAYS[way]).double()
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    plain(x).square().sum().backward()
    placement = consistent.placement.all("cpu")
    model = Block(keys, WAYS[way]).double()
    model.load_state_dict(plain.state_dict())
    consistent.parallelize(model, placement, "tensor")
    with consistent.report() as report:
        y = model(consistent.distribute(x, placement, B))
    y.square().sum().backward()
    torch.testing.assert_close(y.full(), plain(x))
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        grad: Any = p.grad
        torch.testing.assert_close(grad.full(), wanted.grad)
    laid = [model.attention.qkv_proj.weight, model.attention.qkv_proj.bias]
    laid.append(model.mlp.gate_up_proj.weight)
    moved = [line for line in str(report).splitlines() if "all_to_all" in line or "gather" in line]
    return [str(p.sbp[0]) for p in laid], moved


CASES = [(ranks, way, HEADS) for ranks in (2, 3) for way in WAYS]
CASES += [(2, "split", 2), (3, "slices", 3), (3, "split", 3)]  # heads that share a key


@pytest.mark.parametrize(("ranks", "way", "keys"), CASES)
def test_taking_parts_apart_sends_nothing(ranks: int, way: str, keys: int) -> None:
    of = DIM if keys == HEADS else (DIM, keys * WIDTH, keys * WIDTH)
    fused = str(S(0, of=of))
    for laid, moved in pool(ranks).run(_compared, way, keys):
        assert laid == [fused, fused, str(S(0, of=36))]
        assert not moved, moved
