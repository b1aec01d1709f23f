"""A plain tensor that meets a global one is equal on all ranks, or every rank says that it is not;
questions, ranks outside and values that were equal send and say nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, Placement, S
from consistent.dispatch.plans.plan import clear_plans
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, use
from tests.ranks import on_ranks


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return 2 * grad, None


# What meets the global tensor x of shape [4, 3] and how, given a plain tensor that may differ by
# rank: p is [4, 3] of floats.
MEETINGS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "operator": lambda x, p: x + p,
    "plain first": lambda x, p: p * x,
    "in a list": lambda x, p: torch.cat([x, p]),
    "named": lambda x, p: torch.add(x, other=p),
    "mask": lambda x, p: x.masked_fill(p > 1, 0.0),
    "condition": lambda x, p: torch.where(p > 1, x, x + 1),
    "index": lambda x, p: x[p[:, 0].long() % 4],
    "selected": lambda x, p: x[p > 1],
    "ids of an embedding": lambda x, p: F.embedding(p.long() % 4, x),
    "in place": lambda x, p: x.clone().add_(p),
    "copied in": lambda x, p: x.clone().copy_(p),
    "item set": lambda x, p: x.clone().__setitem__(0, p[0]),
    "target": lambda x, p: p.clone().mul_(x),
    "loss target": lambda x, p: F.mse_loss(x, p),
    "class target": lambda x, p: F.cross_entropy(x, p[:, 0].long() % 3),
    "product": lambda x, p: F.linear(p, x),
    "list op": lambda x, p: torch._foreach_add([x, x], [p, x]),
    "function of the user": lambda x, p: _Twice.apply(x, p),
    "gradient": lambda x, p: x.detach().clone().requires_grad_().backward(p),
    "assigned gradient": lambda x, p: setattr(x.detach().clone().requires_grad_(), "grad", p),
    "under autocast": lambda x, p: _autocast(x, p),
    "without gradients": lambda x, p: torch.no_grad()(lambda: x - p)(),
    "in inference mode": lambda x, p: torch.inference_mode()(lambda: x - p)(),
}


def _autocast(x: Any, p: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ p.t()


def _global(sbp: Any = B, ranks: Any = (0, 1)) -> Any:
    values = torch.arange(12.0).view(4, 3)
    return consistent.distribute(values, Placement("cpu", list(ranks)), sbp)


@on_ranks(2)
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize("name", MEETINGS)
def test_what_differs_by_rank_is_an_error_on_every_rank(rank: int, name: str, sbp: str) -> None:
    clear_plans()
    x, unequal = _global(sbp), torch.arange(12.0).view(4, 3) + rank
    with pytest.raises(RuntimeError, match="the ranks have different ones") as caught:
        MEETINGS[name](x, unequal)
    text = str(caught.value)
    assert "test_plain_values.py:" in text and "rank 1: torch." in text
    assert "inputs=S(0)" in text and "distribute" in text and "plain_may_differ" in text
    MEETINGS[name](x, torch.arange(12.0).view(4, 3))  # what is equal is taken


@on_ranks(2)
@pytest.mark.parametrize("name", MEETINGS)
def test_the_switch_takes_each_ranks_own(rank: int, name: str) -> None:
    clear_plans()
    with consistent.plain_may_differ():
        MEETINGS[name](_global(), torch.arange(12.0).view(4, 3) + rank)


@on_ranks(3)
def test_ranks_outside_take_no_part(rank: int) -> None:
    clear_plans()
    x = _global(S(0), (0, 2))
    own = torch.arange(12.0).view(4, 3) + (rank == 1)
    assert (x + own).sum().item() == 132.0


@on_ranks(3)
def test_ranks_outside_may_have_another_value_while_those_inside_differ(rank: int) -> None:
    clear_plans()
    x, own = _global(S(0), (0, 2)), torch.zeros(4, 3) + rank
    if rank == 1:
        x + own
    else:
        with pytest.raises(RuntimeError, match="rank 2"):
            x + own


@on_ranks(2)
def test_questions_send_nothing(rank: int) -> None:
    clear_plans()
    x, own = _global(S(0)), torch.zeros(4, 3) + rank
    with use(Counting(current())) as counting:
        assert torch.is_same_size(x, own) and x.shape == own.shape
        assert torch.result_type(x, own) is torch.float32
        assert x.is_same_size(own)
    assert not counting.calls, counting.calls


@on_ranks(2)
def test_later_meetings_send_nothing_even_after_a_plan_was_forgotten(rank: int) -> None:
    from consistent.dispatch.plans.plan import plans

    clear_plans()
    x, p = _global(), torch.ones(4, 3)
    for _ in range(8):
        x + p
    if rank == 0:
        plans.clear()
    with use(Counting(current())) as counting:
        for size in (4, 6, 1):
            consistent.distribute(torch.ones(size, 3), x.placement, B) + torch.ones(size, 3)
    assert not counting.calls


@on_ranks(2)
def test_memory_that_is_only_filled_may_hold_anything(rank: int) -> None:
    clear_plans()
    x, out = _global(S(0)), torch.full((4, 3), float(rank))
    out.copy_(x)
    assert out.sum().item() == 66.0
    rows = torch.full((4, 3), float(rank))
    for i in range(4):
        rows[i] = x[i]
    assert rows.sum().item() == 66.0
    given = torch.full((4, 3), float(rank))
    torch.add(x, 1.0, out=given)
    assert given.sum().item() == 78.0


@on_ranks(2)
def test_values_of_every_dtype_and_layout_are_compared(rank: int) -> None:
    x = _global()
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.complex64):
        clear_plans()
        for differs in (0, 1):
            p = torch.zeros(4, 3, dtype=dtype)
            p[3, 2] = differs * rank
            if differs:
                with pytest.raises(RuntimeError, match="different ones"):
                    x * p
            else:
                x * p
    clear_plans()
    strided = torch.arange(24.0).view(3, 8)[:, ::2].t()
    assert (x * strided).shape == (4, 3)
    with pytest.raises(RuntimeError, match="different ones"):
        x * torch.arange(24.0).view(3, 8)[:, ::2].t().add(rank)
