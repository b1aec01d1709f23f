"""Tests of the prover itself: it finds wrong claims of every kind, and lists right ones that are
not claimed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from consistent.rules import Call, Row, Signature, table
from consistent.spec import B, P, S, Sbp
from tests.brute_force import check, missing
from tests.consistent.rules.examples.numbers import real
from tests.reference import cut, join


def _claim(monkeypatch: pytest.MonkeyPatch, name: str, ins: Sequence[Sbp], out: Sbp) -> None:
    def rule(call: Call, parts: int) -> list[Signature]:
        return [Signature(tuple(ins), (out,))]

    monkeypatch.setitem(table.ROWS, name, Row(name, rule))


@pytest.mark.parametrize(
    ("name", "args", "ins", "out"),
    [
        ("exp", (real(5, 7),), (P,), P),  # not linear
        ("exp", (real(5, 7),), (S(0),), S(1)),  # wrong dim
        ("sum", (real(5, 7),), (S(0),), B),  # not the whole sum
        ("mean", (real(5, 7),), (S(0),), P),  # divided by the shard's count
        ("add", (real(5, 7), real(7)), (P, B), P),  # added once on every rank
        ("mm", (real(5, 4), real(4, 7)), (S(1), B), P),  # shapes do not meet
        ("cumsum", (real(5, 7), 0), (S(0),), S(0)),
    ],
)
def test_a_wrong_claim_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, args: tuple, ins: Sequence[Sbp], out: Sbp
) -> None:
    _claim(monkeypatch, name, ins, out)
    with pytest.raises(AssertionError, match=name):
        check(getattr(torch, name), *args)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # The values are right, since the largest is the same in every shard; the gradient of ties is
    # wrong.
    _claim(monkeypatch, "amax", (S(0),), B)
    with pytest.raises(AssertionError, match="gradient 0"):
        check(torch.amax, torch.ones(5, 7, dtype=torch.float64), 0)


def test_missing_lists_what_holds_and_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    _claim(monkeypatch, "mm", (B, B), B)
    found = {str(s) for s in missing(torch.mm, real(5, 4), real(4, 7))}
    assert found == {
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, B -> P",
        "B, P -> P",
    }


@pytest.mark.parametrize("sbp", [(S(0), S(0)), (S(1), P), (P, B), (B, S(0)), (P, P)])
def test_scatter_then_gather_is_the_identity(sbp: tuple[Sbp, ...]) -> None:
    x = real(5, 7)
    shards = cut(x, sbp, (2, 3), torch.Generator().manual_seed(0))
    torch.testing.assert_close(join(shards, sbp, (2, 3)), x)
