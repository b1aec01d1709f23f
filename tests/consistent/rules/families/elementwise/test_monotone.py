"""Facts about what passes P(max) and P(min): infinities, NaN, and numbers of any sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent.rules import ROWS
from consistent.rules.families.elementwise.monotone import OPPOSITE_EXTREME
from consistent.spec import EXTREMES, P, Sbp
from tests.brute_force import Expected, prove

INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([-INF, -3.5, -0.5, 0.0, 0.5, 2.5, 30.0, INF, NAN], dtype=torch.float64)
NUMBERS = [2, -3, 0.5, -0.25, 1e-3]


def _passed(func: Callable[..., Any], *args: Any) -> dict[Sbp, Sbp]:
    """What becomes of each extreme of the first operand, each proven."""
    op = Expected(func, args, {})
    found = {}
    for signature in op.signatures(0):
        kinds = [e for e in signature.ins if e.is_extreme]
        if kinds:
            prove(op, [(signature,)])
            found[kinds[0]] = signature.outs[0]
    return found


KEPT = {kind: kind for kind in EXTREMES}


RISING = [n for n, row in ROWS.items() if row.rule == "f(...*) -> ...; rises"]


@pytest.mark.parametrize("name", sorted({*RISING} - {"clamp_max", "clamp_min"}))
def test_what_rises_keeps_infinities_and_nan(name: str) -> None:
    owner = next(o for o in (torch, torch.nn.functional, torch.special) if hasattr(o, _short(name)))
    args = (-1.0, 2.0) if name in ("clamp", "clip") else ()
    function = getattr(owner, _short(name))
    function = torch._C._nn.hardtanh if name == "hardtanh" else function
    function = torch._C._nn.hardsigmoid if name == "hardsigmoid" else function
    function = torch._C._nn.relu6 if name == "relu6" else function
    assert _passed(function, EDGES, *args) == KEPT


def _short(name: str) -> str:
    return name.removeprefix("special_")


@pytest.mark.parametrize("function", [torch.erfc, torch.neg, torch.special.erfc])
def test_what_falls_swaps_them(function: Callable[..., Any]) -> None:
    assert _passed(function, EDGES) == OPPOSITE_EXTREME


@pytest.mark.parametrize("c", NUMBERS)
def test_numbers_shift_and_scale(c: float) -> None:
    assert _passed(torch.add, EDGES, c) == _passed(torch.sub, EDGES, c) == KEPT
    assert _passed(torch.rsub, EDGES, c) == OPPOSITE_EXTREME
    for function in (torch.mul, torch.div):
        assert _passed(function, EDGES, c) == (KEPT if c > 0 else OPPOSITE_EXTREME)


@pytest.mark.parametrize("c", [0.0, 0, INF, -INF, NAN, 5e-324])
def test_numbers_that_make_nan_of_an_infinity_are_not_claimed(c: float) -> None:
    assert _passed(torch.mul, EDGES, c) == {}


@pytest.mark.parametrize("function", [torch.neg, torch.mul, torch.add, torch.rsub])
def test_integers_wrap_around(function: Callable[..., Any]) -> None:
    args = () if function is torch.neg else (2,)
    assert _passed(function, torch.arange(-3, 4), *args) == {}


def test_casts_keep_the_order_unless_bits_are_dropped() -> None:
    assert _passed(torch.Tensor.float, EDGES) == KEPT
    assert _passed(torch.Tensor.double, torch.arange(-3, 4)) == KEPT
    assert _passed(torch.Tensor.long, torch.tensor([True, False])) == KEPT
    for x in (EDGES.nan_to_num(0.0, 5.0, -5.0), torch.arange(-3, 4)):
        assert _passed(torch.Tensor.short, x) == {}


def test_truth_values_are_ordered() -> None:
    x, y = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert _passed(torch.logical_not, x) == _passed(torch.bitwise_not, x) == OPPOSITE_EXTREME
    assert _passed(torch.bitwise_or, x, y)[P(max)] is P(max)
    assert _passed(torch.logical_and, x, y)[P(min)] is P(min)
    assert _passed(torch.bitwise_or, torch.arange(3), torch.arange(3)) == {}


def test_two_tensors_distribute() -> None:
    assert _passed(torch.maximum, EDGES, EDGES.flip(0)) == KEPT
    assert _passed(torch.minimum, EDGES, EDGES.flip(0)) == KEPT
    assert _passed(torch.add, EDGES, EDGES.flip(0)) == {}
