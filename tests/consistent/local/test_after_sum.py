"""What follows a boxing from P to S is done in the pass of its sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consistent.spec import B, P, Placement, S
from consistent.tensor.create import distribute, from_local
from consistent.tensor.plan import clear_plans, plans
from mirrored.counting import counting
from tests.ranks import pool

OPS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, y, w, b: F.relu(x),
    "gelu": lambda x, y, w, b: F.gelu(x),
    "gelu_tanh": lambda x, y, w, b: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y, w, b: F.silu(x),
    "bias": lambda x, y, w, b: x + b,
    "residual": lambda x, y, w, b: x + y,
    "layer_norm": lambda x, y, w, b: F.layer_norm(x, (6,), w, b),
    "rms_norm": lambda x, y, w, b: F.rms_norm(x, (6,), w),
    "layer_norm without weights": lambda x, y, w, b: F.layer_norm(x, (6,)),
}


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=random)


def _inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    shapes = (shape, shape, (6,), (6,))
    return [_numbers(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def _addend(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Addends that differ and add up to ``x``."""
    noise = [_numbers(*x.shape, seed=100 + i) for i in range(1, ranks)]
    return x - sum(noise) if rank == 0 else noise[rank - 1]


def _programs(name: str, tensors: list[Any]) -> list[Any]:
    """Value, gradients, and gradients of the sum of the gradients' squares."""
    y = OPS[name](*tensors)
    first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True, allow_unused=True)
    first = [g for g in first if g is not None]
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors[0])
    return [y, *first, *second]


def _on_ranks(rank: int, name: str, shape: tuple[int, ...], grid: Any, sbp: Any) -> tuple:
    placement = Placement("cpu", torch.arange(torch.Size(grid).numel()).view(grid).numpy())
    x, *others = (t.detach() for t in _inputs(shape))
    part = _addend(x, rank, placement.size)
    whole = from_local(part, placement, (P,) * len(grid)).to_global(sbp=sbp)
    whole = whole.detach().requires_grad_()
    rest = [distribute(t, placement, (B,) * len(grid)).requires_grad_() for t in others]
    made = _programs(name, [whole, *rest])
    return made[0].sbp, [t.detach().full() for t in made]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("rows", [2, 5])
def test_values_and_gradients_on_three_ranks(name: str, rows: int) -> None:
    wanted = _programs(name, _inputs((rows, 6)))
    for _, made in pool(3).run(_on_ranks, name, (rows, 6), (3,), (P,)):
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("sbp", [(P, P), (P, S(0)), (S(0), P)])
def test_values_and_gradients_on_a_grid(sbp: Any) -> None:
    for name in ("gelu", "layer_norm"):
        wanted = _programs(name, _inputs((5, 3, 6)))
        for _, made in pool(4).run(_on_ranks, name, (5, 3, 6), (2, 2), sbp):
            for ours, theirs in zip(made, wanted, strict=True):
                torch.testing.assert_close(ours, theirs.detach())


def _bytes_on_ranks(rank: int) -> list[tuple]:
    x = from_local(torch.randn(4, 6), Placement("cpu", range(2)), (P,))
    y, w, b = x.to_global(sbp=S(0)), torch.ones(6), torch.zeros(6)
    found = []
    for name, op in OPS.items():
        with counting() as log:
            sbp = op(x, y, w, b).sbp
        found.append((name, sbp, log.bytes))
    return found


def test_it_sends_what_the_reduce_scatter_sends() -> None:
    for found in pool(2).run(_bytes_on_ranks):
        for name, sbp, sent in found:
            assert (sbp, sent) == ((S(0),), 4 * 6 * 4 // 2), name


def _kinds_on_ranks(rank: int) -> list[str]:
    clear_plans()
    x = from_local(torch.randn(4, 6), Placement("cpu", range(2)), (P,))
    F.gelu(x)
    F.layer_norm(x, (6,))
    return [str(p.choice.form) for p in plans.values() if getattr(p, "choice", None)]


def test_the_plan_names_the_form() -> None:
    for forms in pool(2).run(_kinds_on_ranks):
        assert forms == ["after_sum", "after_sum"]


def _large_and_small(rank: int) -> list[float]:
    errors = []
    for rows in (3, 4000):  # staged in shared memory, and not
        x = from_local(torch.randn(rows, 64), Placement("cpu", range(2)), (P,))
        y = F.gelu(x)
        errors.append((y.full() - F.gelu(x.full())).abs().max().item())
    return errors


def test_both_ways_of_getting_the_addends_give_the_sum() -> None:
    for errors in pool(2).run(_large_and_small):
        assert max(errors) < 3e-6
