"""What follows a boxing from P to S is done in the pass of its sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consistent.cost_model.messages import Wire
from consistent.dispatch.plans.plan import clear_plans, plans
from consistent.movement.plain_values import plain_may_differ
from consistent.rules import choose, fused_reduce_scatter
from consistent.spec import B, P, Placement, S
from consistent.tensor.making.create import distribute, from_local
from mirrored.transports.counting import counting
from tests.ranks import pool

OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w: F.rms_norm(x, (6,), w),
    "rms_norm without weight": lambda x, w: F.rms_norm(x, (6,), eps=1e-3),
    "rms_norm over two dims": lambda x, w: F.rms_norm(x, (3, 6), w.expand(3, 6)),
}


@contextmanager
def _joining(worth: int = 0) -> Iterator[None]:
    """Parts of ``worth`` bytes join, and messages start at once, so that small sums are not
    finished in one message."""
    devices, before = choose.BUILT_IN, fused_reduce_scatter.MIN_SHARD_BYTES
    # Those by which layouts are chosen, not those of moves, which are kept.
    free = replace(devices["cpu"], message_start_s=0.0, inside=Wire(0.0, 1e9))
    choose.BUILT_IN = {"cpu": free}
    fused_reduce_scatter.MIN_SHARD_BYTES = worth
    clear_plans()
    try:
        yield
    finally:
        choose.BUILT_IN = devices
        fused_reduce_scatter.MIN_SHARD_BYTES = before
        clear_plans()


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=random)


def _inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    shapes = (shape, (6,))
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
    with _joining():
        made = _programs(name, [whole, *rest])
    return made[0].sbp, [t.detach().full() for t in made]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("rows", [2, 5])
def test_values_and_gradients_on_three_ranks(name: str, rows: int) -> None:
    wanted = _programs(name, _inputs((rows, 3, 6)))
    for _, made in pool(3).run(_on_ranks, name, (rows, 3, 6), (3,), (P,)):
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("sbp", [(P, P), (P, S(0)), (S(0), P)])
def test_values_and_gradients_on_a_grid(sbp: Any) -> None:
    wanted = _programs("rms_norm", _inputs((5, 3, 6)))
    for _, made in pool(4).run(_on_ranks, "rms_norm", (5, 3, 6), (2, 2), sbp):
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.detach())


def _bytes_on_ranks(rank: int) -> list[tuple]:
    x = from_local(torch.randn(4, 3, 6), Placement("cpu", range(2)), (P,))
    w, found = torch.ones(6), []
    for name, op in OPS.items():
        with _joining(), plain_may_differ(), counting() as log:
            sbp = op(x, w).sbp
        found.append((name, sbp, log.bytes))
    return found


def test_it_sends_what_the_reduce_scatter_sends() -> None:
    for found in pool(2).run(_bytes_on_ranks):
        for name, sbp, sent in found:
            assert (sbp, sent) == ((S(0),), 4 * 3 * 6 * 4 // 2), name


def _forms_on_ranks(rank: int) -> list[str]:
    placement = Placement("cpu", range(2))
    with _joining(worth=2 * 6 * 4):
        for rows in (4, 2):
            x = from_local(torch.randn(rows, 6), placement, (P,))
            F.rms_norm(x, (6,))
            F.gelu(x)
        return [str(plan.choice.form) for plan in plans.values() if plan.choice is not None]


def test_only_what_is_worth_it_joins() -> None:
    for forms in pool(2).run(_forms_on_ranks):
        assert sorted(forms) == ["None", "None", "None", "fused_reduce_scatter"]


def _large(rank: int) -> tuple[float, torch.dtype]:
    x = from_local(torch.randn(3000, 128).bfloat16(), Placement("cpu", range(2)), (P,))
    with _joining():
        y = F.rms_norm(x, (128,))
    return (y.full().float() - F.rms_norm(x.full().float(), (128,))).abs().max().item(), y.dtype


def test_bfloat16_is_as_near_as_its_rounding() -> None:
    for error, dtype in pool(2).run(_large):
        assert error < 0.05 and dtype == torch.bfloat16
