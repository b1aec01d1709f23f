"""Which signature an op's inputs are boxed into: fits stay, else the cheapest; a P is a debt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from consistent.rules import find_row
from consistent.rules.choose import Choice, choose
from consistent.rules.notation import signatures
from consistent.rules.signature import Call, Operand, Out
from consistent.spec import B, NdSbp, P, Placement, S, Sbp, TensorSpec

MM = "mk, kn -> mn"


def chosen(
    sbps: Sequence[Sbp | NdSbp], shapes: Sequence[tuple[int, ...]], grid: Sequence[int]
) -> Choice:
    ranks = torch.arange(math.prod(grid)).view(*grid).tolist()
    placement = Placement("cpu", ranks)
    specs = [
        TensorSpec.of(placement, sbp, shape, torch.float32)
        for sbp, shape in zip(sbps, shapes, strict=True)
    ]
    call = Call("op", (), {}, tuple(Operand(i, spec) for i, spec in enumerate(specs)))
    call.args = call.operands
    call.outs = (Out(torch.Size((shapes[0][0], shapes[1][1])), torch.float32),)
    choice = choose(call, specs, [list(signatures(MM, shapes))] * len(grid), None)
    assert choice is not None
    return choice


@pytest.mark.parametrize(
    ("x", "w", "out"),
    [
        (S(0), B, S(0)),
        (B, S(1), S(1)),
        (S(1), S(0), P),
        (B, B, B),
        (P, B, P),
        (S(0), S(1), S(0)),  # the second of two alike moves
    ],
    ids=str,
)
def test_data_stays_where_it_is(x: Sbp, w: Sbp, out: Sbp) -> None:
    assert chosen([x, w], [(64, 64), (64, 64)], [2]).outs == ((out,),)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_short_inner_dim_is_cheaper_to_gather_than_its_large_product_to_reduce(
    ranks: int,
) -> None:
    narrow, wide = [(4096, 8), (8, 4096)], [(256, 4096), (4096, 256)]
    assert chosen([S(1), S(0)], narrow, [ranks]).outs == ((S(0),),)
    assert chosen([S(1), S(0)], wide, [ranks]).outs == ((P,),)


def test_a_debt_that_came_with_the_inputs_is_no_reason_to_move() -> None:
    assert chosen([P, B], [(4096, 8), (8, 4096)], [4]).outs == ((P,),)


def test_a_debt_counts_as_much_as_the_other_axes_leave_of_it() -> None:
    # Of 16384 rows a rank has 256, whose products are less than the weight that all would gather.
    shapes = [(1 << 14, 1024), (1024, 1024)]
    alone = chosen([S(1), S(0)], shapes, [8])
    among = chosen([(S(0), S(1)), (B, S(0))], shapes, [64, 8])
    assert alone.outs == ((S(0),),)
    assert among.outs == ((S(0), P),)


def test_only_what_no_size_decides_is_remembered_for_other_sizes() -> None:
    small = [(4, 4), (4, 4)]
    assert not chosen([S(0), B], small, [2]).by_size
    assert not chosen([P, B], small, [2]).by_size
    assert chosen([S(1), S(0)], small, [2]).by_size
    assert chosen([S(0), S(1)], small, [2]).by_size


def joined(name: str, sbps: Sequence[Sbp], shape: tuple[int, ...], ranks: int) -> Sbp:
    """Where the output of an elementwise op lies."""
    placement = Placement("cpu", list(range(ranks)))
    specs = [TensorSpec.of(placement, (sbp,), shape, torch.float32) for sbp in sbps]
    call = Call(name, (), {}, tuple(Operand(i, spec) for i, spec in enumerate(specs)))
    call.args, call.outs = call.operands, (Out(torch.Size(shape), torch.float32),)
    row = find_row(name)
    assert row is not None
    choice = choose(call, specs, [row.signatures(call, ranks)], None)
    assert choice is not None
    return choice.outs[0][0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_small_sum_is_finished_in_one_message_and_a_large_one_in_halves(ranks: int) -> None:
    small, large = (1, 64), (1 << 16, 1024)
    assert joined("exp", [P], small, ranks) is B
    assert joined("exp", [P], large, ranks) == S(0)
    # A residual stream, and what a layer split by rows adds to it.
    assert joined("add", [B, P], small, ranks) is B
    assert joined("add", [B, P], large, ranks) == S(0)
