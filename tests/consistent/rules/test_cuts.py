"""Dims that are cut in other ways, on the examples of all rows: each signature for them is proven
as every signature is, and each op gives torch's values and gradients for operands that lie so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.forms.random import generator
from consistent.rules.cuts import as_cut
from consistent.spec import Placement, Split
from consistent.spec.cut import DimCut, cut_of
from tests.brute_force import Earlier, Example, prove
from tests.brute_force.expected import RANDOM, Expected
from tests.consistent.rules.corpus import EXAMPLES, FAMILIES
from tests.each_of import each
from tests.ranks import ALL, simulate
from tests.reference import assert_close

RANKS = 3
WHOLE_RANKS = 2  # of programs: each rank has some of most operands


def _sized(n: int, parts: int = RANKS) -> tuple[int, ...]:
    """Sizes of pieces that are not balanced, of three one empty."""
    return (max(0, n - 1), *[0] * (parts - 2), min(1, n))


def _cuts(n: int) -> list[DimCut]:
    made = [
        cut_of(cut="zigzag"),
        cut_of(blocks=1),
        cut_of(sizes=_sized(n)),
        cut_of(of=(n - n // 2, n // 2)),
    ]
    return [cut for cut in (made if ALL else made[:2]) if cut is not None]


def _size(op: Expected, option: object) -> int | None:
    """The size of the dims that a signature splits."""
    ins = option.ins  # type: ignore[attr-defined]
    pairs = zip(op.call.operands, ins, strict=True)
    return next((x.shape[e.dim] for x, e in pairs if isinstance(e, Split)), None)


def check(case: Example, earlier: Earlier) -> None:
    """Prove every signature that is claimed for cuts."""
    op = case.expected(RANKS)
    claimed = []
    for option in op.signatures(0):
        n = _size(op, option)
        cuts = [] if n is None else _cuts(n)
        twins = [as_cut(option, op.row, op.call, RANKS, cut) for cut in cuts]
        claimed += [(twin,) for twin in twins if twin is not None]
    prove(op, claimed, earlier)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_signature_for_a_cut_is_right(family: str) -> None:
    earlier = Earlier()
    each(FAMILIES[family], lambda case: check(case, earlier))


# -- through dispatch ------------------------------------------------------------------------------


def _laid(x: torch.Tensor, k: int, placement: Placement) -> Any:
    """``x`` cut along its first dim or its last one, in one of the ways."""
    if x.ndim == 0 or x.layout is not torch.strided:
        return consistent.distribute(x, placement, B)
    dim = (0, x.ndim - 1)[k % 2]
    n = x.shape[dim]
    cuts = [cut_of(cut="zigzag"), cut_of(blocks=1), cut_of(sizes=_sized(n, WHOLE_RANKS))]
    return consistent.distribute(x, placement, Split(dim, cuts[k // 2 % 3]))


def _run_globally(rank: int, op: Expected, ways: tuple[int, ...]) -> None:
    for k in ways:
        leaves, plain = [], [t.detach().clone() for t in op.tensors]
        given = [_laid(x, k, op.placement) for x in plain]
        for i in op.leaves:
            leaves.append(given[i].requires_grad_())
            given[i] = given[i].clone() if i in op.written else given[i]
        with generator.separate_state(RANDOM):
            found = op.results(op.run(given), given)
        for x, want in zip(found, op.expected, strict=True):
            made: Any = x
            whole = made.full() if hasattr(made, "full") else made
            assert_close(whole, want, rtol=op.tolerance, atol=op.tolerance)
        for i in op.written:
            assert_close(
                given[i].detach().full(), op.after[i], rtol=op.tolerance, atol=op.tolerance
            )
        asked = [i for i in op.differentiable if found[i].requires_grad]
        if not asked or not leaves:
            continue
        seeds = [op.cotangents[op.differentiable.index(i)] for i in asked]
        seeds = [consistent.distribute(g, op.placement, B) for g in seeds]
        grads = torch.autograd.grad([found[i] for i in asked], leaves, seeds, allow_unused=True)
        for g, want in zip(grads, op.gradients, strict=True):
            made: Any = g
            have = torch.zeros_like(want) if g is None else made.full()
            assert_close(have, want, rtol=op.tolerance, atol=op.tolerance)


def _check_globally(case: Example) -> None:
    op = case.expected(WHOLE_RANKS)
    simulate(_run_globally, WHOLE_RANKS, op, tuple(range(6)) if ALL else WAYS[id(case)])


def _ways() -> dict[int, tuple[int, ...]]:
    """The ways of each example: the examples of one op take one after the other, and a single one
    takes two."""
    by_name: dict[str, list[Example]] = {}
    for case in EXAMPLES:
        by_name.setdefault(resolve(case.func).name, []).append(case)
    return {
        id(case): (i % 6,) if len(cases) > 1 else (0, 1)
        for cases in by_name.values()
        for i, case in enumerate(cases)
    }


WAYS = _ways()


NOT_DRAWN = [family for family in FAMILIES if family != "random"]


@pytest.mark.parametrize("family", NOT_DRAWN)
def test_every_op_takes_operands_with_cuts(family: str) -> None:
    each(FAMILIES[family], _check_globally)
