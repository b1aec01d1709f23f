"""Steps that use plain tensors of the program's own are programs, though ranks compare these the
first times that they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks


class Scale(torch.autograd.Function):
    """x: [n, d], w: [d] -> x * w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


weights = torch.arange(1.0, 5.0, dtype=torch.float64)
edges = torch.arange(5.0, dtype=torch.float64)
normal = Normal(weights, weights + 1, validate_args=False)
STEPS: dict[str, Any] = {
    "a function of the user's own": lambda x: Scale.apply(x, weights),
    "an op without a rule": lambda x: torch.bucketize(x, edges),
    "a distribution": lambda x: normal.log_prob(x),
    "an op": lambda x: x * weights,
}


@pytest.mark.parametrize("name", STEPS)
@on_ranks(2)
def test_it_is_a_program_from_the_second_call_on(rank: int, name: str) -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    run: Any = consistent.compile(STEPS[name], backend="ops")
    for _ in range(3):
        found = run(consistent.distribute(x, Placement.all("cpu"), S(0)))
        torch.testing.assert_close(found.full(), STEPS[name](x))
    assert run.programs and all(each.program is not None for each in run.programs), run.show()
