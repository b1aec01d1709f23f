"""P(max) and P(min) on global tensors: kept through ops, one trip in the end, forward only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, S, plain_may_differ
from mirrored.transports.counting import counting
from tests.consistent.programs.programs import lay
from tests.each_of import each_of
from tests.ranks import ON_ONE_AXIS, pool

X = torch.tensor([[3.0, -1, 7], [2, 9, -4], [0, 5, 6], [1, 8, -2]], dtype=torch.float64)


def _given(rank: int, world: int, name: str) -> Any:
    sbp = {"split": S(0), "columns": S(1), "max": P(max), "min": P(min), "sum": P}[name]
    return lay(X, consistent.placement("cpu", range(world)), sbp, seed=1)


# (code on x, what x is, SBP of the result)
KEPT: list[tuple[str, str, Any]] = [
    ("x.amax(0)", "split", P(max)),
    ("x.amin(0, keepdim=True)", "split", P(min)),
    ("x.max()", "split", P(max)),
    ("x.min()", "columns", P(min)),
    ("(x > 6).any(1)", "columns", P(max)),
    ("(x > -3).all()", "split", P(min)),
    ("x.amax(0).amax()", "split", P(max)),
    ("x.amax(0).exp() * 2 - 1", "split", P(max)),
    ("torch.maximum(x.amax(0), x.abs().amax(0))", "split", P(max)),
    ("torch.maximum(x.amax(0), torch.ones(3, dtype=x.dtype))", "split", P(max)),
    ("-x.amax(0)", "split", P(min)),
    ("x.amax(0)[1:].unsqueeze(0).expand(2, 2)", "split", P(max)),
    ("x.amax(0).clamp(0, 5).float().relu()", "split", P(max)),
    ("~(x > 6).any(0)", "split", P(min)),
    ("x.amax(0) * -1.5", "split", P(min)),
    ("x.tanh().view(-1)", "max", P(max)),
    ("torch.cat([x, x.sigmoid()], 1)", "min", P(min)),
    ("torch.where(X > 0, x, 0.5)", "max", P(max)),
    ("torch.zeros_like(x)", "max", B),
]


def _run(rank: int, world: int, code: str, name: str) -> tuple:
    # Without the comparison of plain tensors, which sends where a plan is made.
    with plain_may_differ(), counting() as log:
        out = eval(code, {"x": _given(rank, world, name), "torch": torch, "X": X})  # noqa: S307
    return out.sbp[0], len(log.calls), out.full()


@each_of("world", ON_ONE_AXIS)
@each_of(("code", "name", "sbp"), KEPT)
def test_the_result_is_partial_and_nothing_is_sent(
    world: int, code: str, name: str, sbp: Any
) -> None:
    expected = eval(code, {"x": X, "torch": torch, "X": X})  # noqa: S307
    for got, sent, full in pool(world).run(_run, world, code, name):
        assert (got, sent) == (sbp, 0)
        assert full.dtype == expected.dtype and torch.equal(full, expected)


# What is not a function of the largest element alone is reduced before.
REDUCED = [
    "x + x", "x * x", "x * torch.ones(3)", "x.sum(0)", "x.log()", "x.long()", "x * 0.0",
    "x.amin(0)", "x == 9", "x @ x.T", "2 / x", "x.abs()",
    "x * float('inf')", "x.sort(0).values", "torch.add(x, 1.0, alpha=-1)", "x.cumsum(0)",
]  # fmt: skip


@each_of("code", REDUCED)
def test_what_is_not_monotone_is_right_too(code: str) -> None:
    expected = eval(code, {"x": X, "torch": torch})  # noqa: S307
    for sbp, _, full in pool(3).run(_run, 3, code, "max"):
        assert not sbp.is_extreme
        torch.testing.assert_close(full, expected, equal_nan=True)


def _gradient(rank: int, code: str) -> tuple:
    x = _given(rank, 3, "split").requires_grad_()
    y = eval(code, {"x": x, "torch": torch})  # noqa: S307
    sbps = [y.sbp[0]]
    y.sum().backward()
    with torch.no_grad():
        sbps.append(eval(code, {"x": x, "torch": torch}).sbp[0])  # noqa: S307
    return sbps, x.grad.full()


@pytest.mark.parametrize("code", ["x.amax(0)", "x.min()", "torch.maximum(x, x.detach().amax(0))"])
def test_where_gradients_are_asked_for_the_winner_is_known(code: str) -> None:
    x = X.clone().requires_grad_()
    eval(code, {"x": x, "torch": torch}).sum().backward()  # noqa: S307
    for (asked, not_asked), grad in pool(3).run(_gradient, code):
        assert not asked.is_extreme
        assert not_asked.is_extreme or "maximum" in code
        torch.testing.assert_close(grad, x.grad)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.amax().item(),
    "bool": lambda x: bool((x.amax() > 8).any()),
    "float": lambda x: float(x.amin()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "nonzero": lambda x: torch.nonzero(x > 2).tolist(),
    "mask": lambda x: x[x > 2].tolist(),
    "unique": lambda x: x.unique().tolist(),
    "masked_select": lambda x: x.masked_select(x < 0).tolist(),
    "contains": lambda x: 9 in x,
    "index": lambda x: list(range(20))[x.amax().long()],
    "len of nonzero": lambda x: len(x.nonzero()),
    "where": lambda x: [i.tolist() for i in torch.where(x > 4)],
    "branch": lambda x: "yes" if (x > 8).any() else "no",
    "truth": lambda x: bool((x > -9).all()),
}


def _read(rank: int, kind: str, name: str) -> Any:
    return READS[name](_given(rank, 3, kind))


@each_of("kind", ["split", "columns", "max", "min", "sum"])
@each_of("name", sorted(READS))
def test_reading_gives_the_logical_value_on_every_rank(kind: str, name: str) -> None:
    results = pool(3).run(_read, kind, name)
    assert results[0] == results[1] == results[2]
    if name != "print":
        assert results[0] == READS[name](X)


def _refused(rank: int, code: str) -> str:
    x = _given(rank, 2, "max")
    y = _given(rank, 2, "split").requires_grad_()
    try:
        eval(code, {"x": x, "y": y, "torch": torch, "P": P})  # noqa: S307
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x.requires_grad_()", ["P(max)", "no gradient", "x.to_global(sbp=B)"]),
        ("torch.nn.Parameter(x)", ["P(max)", "no gradient", "x.to_global(sbp=B)"]),
        ("y.to_global(sbp=P('max'))", ["no derivative", "P(max)", "x.detach()"]),
        ("torch.view_as_complex(x[:, :2]).to_global(sbp=P('max'))", ["complex", "no order"]),
    ],
)
def test_gradients_of_extremes_are_refused(code: str, words: list[str]) -> None:
    for message in pool(2).run(_refused, code):
        assert all(word in message for word in words), message


def _made(rank: int) -> list[Any]:
    p = consistent.placement("cpu", range(3))
    pieces = consistent.from_local(torch.tensor([float(rank), -rank]), p, P(max))
    flags = consistent.from_local(torch.tensor([rank == 1, False]), p, "P(max)")
    filled = consistent.full((2,), -3.0, placement=p, sbp=P(min))
    drawn = consistent.randn(4, placement=p, sbp=P(max)).full()
    return [pieces.tolist(), flags.tolist(), filled.tolist(), str(pieces.sbp), drawn.tolist()]


def test_pieces_and_factories_make_extremes() -> None:
    for pieces, flags, filled, sbp, _ in pool(3).run(_made):
        assert (pieces, flags, filled, sbp) == ([2.0, 0.0], [True, False], [-3.0] * 2, "(P(max),)")


def _over_two_axes(rank: int) -> tuple:
    x = lay(X, consistent.placement("cpu", [[0, 1], [2, 3]]), (P, S(0)))
    y = (-x.amin()).relu()
    return y.item(), y.to_global(sbp=(P, B)).sbp, y.to_global(sbp=(B, P)).full().item()


def test_axes_are_partial_in_one_way_on_the_way_too() -> None:
    wanted = [(4.0, (P, B), 4.0)] * 4
    assert pool(4).run(_over_two_axes) == wanted


def _trips(rank: int) -> list[int]:
    x = _given(rank, 3, "split")
    with counting() as log:
        both = torch.maximum(x.amax(0), (-x).amax(0)).exp().amax()
        both.item()
    return [len(log.calls)]


def test_a_chain_of_extremes_makes_one_trip() -> None:
    assert pool(3).run(_trips) == [[1]] * 3
