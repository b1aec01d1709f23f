"""Both tables of ops count the flops of a product alike, and as torch's counter does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from consistent import placement
from consistent.auto.machines.op_count import record_works
from consistent.layout_problem.costs import flops_of
from consistent.nn.planners.layout_search.record import record


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


CASES = {
    "mm": (lambda x, y: torch.mm(x, y), rand(3, 4), rand(4, 5)),
    "bmm": (lambda x, y: torch.bmm(x, y), rand(2, 3, 4), rand(2, 4, 5)),
    "matmul": (lambda x, y: x @ y, rand(2, 3, 4), rand(4, 5)),
    "linear": (lambda x, y: F.linear(x, y), rand(2, 3, 4), rand(5, 4)),
    "addmm": (lambda x, y: torch.addmm(x.new_zeros(5), x, y), rand(3, 4), rand(4, 5)),
    "mv": (lambda x, y: torch.mv(x, y), rand(3, 4), rand(4)),
    "dot": (lambda x, y: torch.dot(x, y), rand(6), rand(6)),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), rand(3, 4), rand(5, 4)),
    "conv1d": (lambda x, y: F.conv1d(x, y), rand(2, 3, 9), rand(4, 3, 2)),
    "conv2d": (lambda x, y: F.conv2d(x, y, groups=2), rand(2, 4, 9, 8), rand(6, 2, 3, 3)),
    "conv_transpose2d": (
        lambda x, y: F.conv_transpose2d(x, y, stride=2),
        rand(2, 3, 5, 4),
        rand(3, 6, 2, 2),
    ),
    "attention": (
        lambda x, y: F.scaled_dot_product_attention(x, y, y),
        rand(2, 3, 6, 4),
        rand(2, 3, 5, 4),
    ),
}
# torch's counter has no formula for these, of attention for the function of the CPU alone.
NOT_COUNTED = ("mv", "dot", "attention")


class Two(torch.nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)


@pytest.mark.parametrize("name", CASES)
def test_names_of_ops_and_functions_of_aten_lead_to_equal_flops(name):
    run, *given = CASES[name]
    program = record(Two(run), Two(run), placement("cpu", [0]), tuple(given), {})
    by_name = sum(flops_of(op.call) for op in program.ops)
    assert by_name == sum(work.flops for work in record_works(lambda: run(*given)))
    with FlopCounterMode(display=False) as counter:
        run(*given)
    assert by_name == counter.get_total_flops() or name in NOT_COUNTED
    assert by_name > 0
