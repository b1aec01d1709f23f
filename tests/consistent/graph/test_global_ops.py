"""Tests of noting global ops by the numbers of their tensors."""

from __future__ import annotations

import torch

import consistent
from consistent import B, Placement
from consistent.graph.global_ops import CHOSEN, CONSTANT, OP, GlobalOps, Op, Value
from consistent.spec.tracer import Tracer


def test_ops_are_noted_by_what_they_read_and_make() -> None:
    p = Placement.all("cpu")
    x = consistent.distribute(torch.randn(4, 3), p, B)
    w = consistent.distribute(torch.randn(3, 2), p, B).requires_grad_()
    values: list[Value] = []
    recorder, ops = GlobalOps(values), list[Op]()

    def note(plan: object, given: list, out: object, *_: object) -> None:
        ops.append(recorder.op(plan, given, out))

    with Tracer(on_op_end=note).tracing():
        made = x @ w
        turned = made.t()
        kept = turned.detach()
        kept.add_(1)
    assert [(op.name, op.ins, op.outs) for op in ops] == [
        ("matmul", (0, 1), (2,)),
        ("t", (2,), (3,)),
        ("detach", (3,), (4,)),
        ("add", (4,), (5,)),
    ]
    assert [op.view for op in ops] == [False, True, True, False]
    assert [op.tracked for op in ops] == [(False, True), (True,), (True,), (False,)]
    assert all(op.kind == CHOSEN and op.row is not None for op in ops)
    assert [value.kind for value in values] == [CONSTANT] * 2 + [OP] * 4
    assert (
        recorder.number_or_none(kept) == 5
        and recorder.number_or_none(consistent.ones(1, placement=p, sbp=B)) is None
    )


def test_a_tensor_that_is_laid_in_another_way_is_another_value() -> None:
    p = Placement.all("cpu")
    recorder = GlobalOps([])
    x = consistent.distribute(torch.randn(4), p, B)
    assert recorder.number(x) == recorder.number(x) == 0
    x.data = consistent.distribute(torch.randn(6), p, B)
    assert recorder.number_or_none(x) is None and recorder.number(x) == 1
