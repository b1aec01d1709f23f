"""Functions of the user's with a forward and a backward of their own, in a program."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.autograd import Function

import consistent
from consistent import B, Placement, S
from tests.consistent.compiled.steps import Made, beside
from tests.consistent.torch_patches.functions_of_users import BLOCKS, loss, model
from tests.ranks import ALL, on_ranks
from tests.twins import randn


class _Square(Function):
    """Writes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x, None


class _SquareAndHalve(_Square):
    """Writes past autograd, always."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        scale.data.mul_(0.5)
        return _Square.forward(ctx, x, scale)


class _SquareAndClip(_Square):
    """Writes past autograd, what may be the values that were there."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        scale.data.copy_(torch.where(x.amax() > 5, scale * 0.25, scale))
        return _Square.forward(ctx, x, scale)


@pytest.mark.parametrize("function", [_Square, _SquareAndHalve, _SquareAndClip])
@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
@on_ranks(2, 3)
def test_a_function_that_writes_past_autograd(rank: int, function: Any, sbp: Any) -> None:
    world = Placement.all("cpu")

    def make() -> Made:
        w = consistent.distribute(randn(5, 4), world, sbp).requires_grad_()
        scale = consistent.distribute(randn(5, seed=1), world, sbp)

        def step(x: Any) -> Any:
            w.grad = None
            loss = (function.apply(w * x, scale).sum(1) * scale).sum()
            loss.backward()
            return loss, w.grad

        return step, [w, scale]

    # The first call runs as it is written, and the second is recorded; nothing is clipped in both.
    small, large = (consistent.distribute(randn(5, 4) * by, world, B) for by in (0.1, 9.0))
    program = beside(make, [(small,), (small,), (large,), (small,), (large,)])
    assert len(program.programs) == 1


@on_ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["ops", *(["inductor"] if ALL else [])])
def test_checkpoints_and_adjoints_by_hand_over_modules(rank: int, backend: str) -> None:
    """Each function that runs a module, or backward, inside: as a program, or as it is written."""
    placement, x, target = Placement.all("cpu"), randn(6, 4, seed=1), randn(6, 4, seed=2)
    for block, plan in itertools.product(BLOCKS, ("data", "zero3")):
        net = model(block)
        wanted = [_stepped(net)(x, target).item() for _ in range(4)]
        net = consistent.parallelize(model(block), placement, plan)
        made = consistent.compile(_stepped(net), backend=backend)
        given = [consistent.distribute(each, placement, S(0)) for each in (x, target)]
        found = [made(*given).item() for _ in range(4)]
        assert found == pytest.approx(wanted, rel=1e-9), (block, plan)


def _stepped(net: Any) -> Any:
    """A step of SGD, which keeps nothing."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Any, target: Any) -> Any:
        optimizer.zero_grad()
        value = loss(net(x), target)
        value.backward()
        optimizer.step()
        return value

    return step
