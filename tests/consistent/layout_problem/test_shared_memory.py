"""What shares memory on one device, and when it is written."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from consistent import placement
from consistent.nn.planners.layout_search.program import RecordedStep
from consistent.nn.planners.layout_search.record import record


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2.0
        h.t().add_(1.0)
        y = h.contiguous()
        return y.mul_(3.0) + x


def recorded() -> RecordedStep:
    return record(Writes(), Writes(), placement("cpu", [0]), (torch.ones(2, 3),), {})


def test_writes_through_views_and_the_same_tensor_are_known():
    program = recorded()
    memory, ops = program.memory, program.ops
    at = [at for at, _ in program.timed_ops]
    assert [op.name for op in ops] == ["mul", "t", "add", "contiguous", "mul", "add"]
    (x,), (h,), (turned,) = ops[0].ins, ops[0].outs, ops[1].outs
    assert not memory.is_written_after(x, -1)  # it is only read
    assert memory.is_written_after(h, at[0]) and memory.is_written_after(h, at[2])
    assert not memory.is_written_after(h, at[4])
    assert memory.is_written_after(turned, at[3])


def test_what_is_written_and_views_of_it_must_stay_where_they_are():
    program = recorded()
    stay = [program.memory.must_stay(op, at) for at, op in program.timed_ops]
    assert stay == [False, True, True, False, True, False]
