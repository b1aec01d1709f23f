"""Advice: a change of layouts is named only where the op then moves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, S
from consistent.drawing.pages.html import layout_html
from mirrored import counting
from tests.ranks import on_ranks, pool


def _laid(shape: tuple[int, ...], sbp: Any, ranks: Any = (0, 1)) -> Any:
    return consistent.distribute(torch.ones(shape), consistent.placement("cpu", ranks), sbp)


def _matmul(rank: int) -> Any:
    x, w = _laid((64, 32), S(0)), _laid((32, 48), S(1))
    with consistent.report() as r:
        x @ w
        x @ w.to_global(sbp=B)  # boxed by the program itself
    return [str(each) for each in r.advice], str(r), r.html()


def test_operands_that_need_not_be_boxed_are_named() -> None:
    ((advice,), text, page) = pool(2).run(_matmul)[0]
    assert advice.startswith("`matmul` at test_advice.py:")
    assert advice.endswith(
        "gathers `other`, f32[32, 48] S(1), to B: 3 KiB a call. If `other` came as B (3 KiB more "
        "on each rank), nothing would move here, and the result would lie as it does now. Or if "
        "`input` came as B (4 KiB more on each rank), nothing would move here; the "
        "result would be S(1)."
    )
    assert f"advice: {advice}" in text and "<code>other</code>" in page


CASES = {
    "matmul": (torch.matmul, ((64, 32), S(0)), ((32, 48), S(1))),
    "inner dim": (torch.matmul, ((8, 512), S(1)), ((512, 8), S(1))),
    "linear": (F.linear, ((16, 8), S(0)), ((12, 8), S(0)), ((12,), S(0))),
    "linear, inner": (F.linear, ((16, 8), S(0)), ((12, 8), S(1)), ((12,), B)),
    "add": (torch.add, ((16, 8), S(0)), ((16, 8), S(1))),
}


def _follow(rank: int, name: str) -> Any:
    """What each piece of advice changes, done: the bytes that are then sent."""
    func, *given = CASES[name]
    with consistent.report() as r:
        func(*(_laid(*each) for each in given))
    found = []
    for advice in r.advice:
        line = next(iter(r.lines))
        for way in advice.instead.split(" Or "):
            said, _, result = way.partition(", nothing would move here")
            inputs = [_laid(*each) for each in given]
            names = {"input": 0, "other": 1, "weight": 1, "bias": 2, "self": 0}
            for part in said[3:].split(" and "):
                operand, _, rest = part.partition(" came as ")
                index = names[operand.strip("`")]
                sbp = rest.split(" ")[0]
                inputs[index] = _laid(given[index][0], sbp)
            with counting() as log:
                y = func(*inputs)
            found.append((log.bytes, repr(y.sbp[0]), result, line.op))
    return found


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_moves_nothing(name: str) -> None:
    found = pool(2).run(_follow, name)[0]
    for sent, result, said, _ in found:
        assert sent == 0
        assert "as it does now" in said or f"would be {result}" in said
    assert found


@on_ranks(2)
def test_addends_have_to_be_summed_somewhere_and_give_no_advice(rank: int) -> None:
    x = _laid((8, 8), P)
    with consistent.report() as r:
        torch.relu(x)
        x.add_(_laid((8, 8), S(0)))
    assert r.nbytes and not r.advice


@on_ranks(2)
def test_a_run_on_whole_tensors_says_why(rank: int) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

    with consistent.report() as r:
        Twice.apply(_laid((8, 8), S(0)))
    (advice,) = r.advice
    assert advice.nbytes == 128 and "runs whole on every rank, for it has no row" in str(advice)


def test_labels_are_put_on_sbps_alone() -> None:
    assert layout_html("4 B of B") == '4 B of <span class="sbp">B</span>'
    assert layout_html("P(max) <b>").startswith('<span class="sbp p">P(max)</span> &lt;b&gt;')
