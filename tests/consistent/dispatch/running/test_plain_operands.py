"""Plain tensors beside global ones: they count as broadcast, stay as they are, and the hook calls
torch with them without going through Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from consistent.dispatch.running.on_shards import OnShards
from tests.ranks import on_ranks

HERE = consistent.placement("cpu", [0])
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, m: x * m,
    "reflected": lambda x, m: m - x,
    "where": lambda x, m: torch.where(m > 0, x, m),
    "isin": lambda x, m: torch.isin(x, m),
    "matmul": lambda x, m: x @ m,
    "masked_fill": lambda x, m: x.masked_fill(m > 0, 1.0),
    "index": lambda x, m: x[:, m[0] > 0],
    "cat": lambda x, m: torch.cat([x, m]),
    "add_": lambda x, m: x.clone().add_(m),
    "several outputs": lambda x, m: torch.broadcast_tensors(x, m)[1] + x,
}


def numbers(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPS)
def test_an_op_beside_a_plain_tensor_gives_what_torch_gives(name: str) -> None:
    call = OPS[name]
    for sbp in (B, S(0)):
        for rows in (4, 4, 4, 4, 4, 4, 5, 4, 5):  # known shapes, and new ones
            x, m = numbers(rows, rows), numbers(9, rows if name not in ("matmul", "cat") else 4)
            out = call(consistent.distribute(x, HERE, sbp), m)
            assert torch.equal(out.full(), call(x, m))
            assert type(m) is torch.Tensor


def test_it_does_not_go_through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    x, m, runs = consistent.distribute(numbers(0), HERE, B), numbers(1), list[str]()
    for _ in range(8):
        x * m
    monkeypatch.setattr(OnShards, "run", lambda self, *_: runs.append(self.name))
    assert torch.equal((x * m).full(), numbers(0) * m) and not runs


def test_a_plain_tensor_that_an_op_returns_itself_stays_plain() -> None:
    x, m = consistent.distribute(numbers(0), HERE, B), numbers(1)
    for _ in range(8):
        out = torch.atleast_2d(x, m)[1]
        assert type(m) is torch.Tensor and isinstance(out, consistent.GlobalTensor)
        assert torch.equal(out.full(), m)


def test_one_that_requires_grad_gets_the_whole_gradient() -> None:
    x, w = consistent.distribute(numbers(0), HERE, B), numbers(1)
    for turn in range(8):
        w = w.detach().requires_grad_(turn % 2 == 1)
        y = (x * w).sum()
        assert y.requires_grad is w.requires_grad
        if w.requires_grad:
            y.backward()
            assert type(w.grad) is torch.Tensor and torch.equal(w.grad, numbers(0))


@on_ranks(2)
def test_check_mode_still_compares_them(rank: int) -> None:
    x = consistent.distribute(numbers(0), consistent.placement("cpu", [0, 1]), B)
    for _ in range(8):
        x * numbers(1)
    with consistent.check_mode(), pytest.raises(RuntimeError, match="the ranks' values differ"):
        x * numbers(rank)


def test_a_report_sees_them() -> None:
    x, m = consistent.distribute(numbers(0), HERE, B), numbers(1)
    for _ in range(8):
        x * m
    with consistent.report() as seen:
        x * m
    assert "mul" in str(seen)


def test_under_a_transform_of_torch_func_it_raises() -> None:
    x = consistent.distribute(numbers(0), HERE, B)
    for _ in range(8):
        x * numbers(1)
    with pytest.raises(RuntimeError, match="transform"):
        torch.func.vmap(lambda m: x * m)(torch.stack([numbers(1), numbers(2)]))
