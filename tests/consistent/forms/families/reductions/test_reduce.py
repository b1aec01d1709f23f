"""Facts about reductions along a split dim that the brute force over rows does not name."""

from __future__ import annotations

import math

import torch

from consistent.spec import P, S
from mirrored.reduction import identity
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real


def test_the_first_of_equal_numbers_wins_across_ranks() -> None:
    x = torch.tensor([1.0, 3, 0, 3, 3, 2])
    assert [
        index.item() for index, _ in run_form("argmax_or_argmin", torch.argmax, (x,), (S(0),), 0)
    ] == [1, 1, 1]


def test_argmax_of_all_elements_counts_in_the_whole_tensor() -> None:
    x = torch.zeros(4, 5)
    x[2, 3] = x[3, 0] = 1
    for dim in (0, 1):
        assert {
            i.item() for i, _ in run_form("argmax_or_argmin", torch.argmax, (x,), (S(dim),))
        } == {13}


def test_nan_wins_wherever_it_lies() -> None:
    x = torch.tensor([1.0, 2, 3, math.nan, 5, math.inf])
    for values, _ in run_form("argmax_or_argmin", torch.max, (x,), (S(0),), 0):
        assert values.values.isnan() and values.indices == 3


def test_more_ranks_than_elements_takes_no_harm() -> None:
    x = real(2)
    for value, _ in run_form("logsumexp", torch.logsumexp, (x,), (S(0),), 0, ranks=4):
        torch.testing.assert_close(value, x.logsumexp(0))


def test_a_row_masked_out_on_one_rank_does_not_spoil_softmax() -> None:
    x = torch.tensor([-math.inf, -math.inf, 0.0, 1.0, 2.0, 3.0])
    pieces = [piece for piece, _ in run_form("softmax", torch.softmax, (x,), (S(0),), 0)]
    torch.testing.assert_close(torch.cat(pieces), x.softmax(0))


def test_variance_does_not_cancel_far_from_zero() -> None:
    x = real(300).float() + 1e4
    for value, _ in run_form("variance", torch.var, (x,), (S(0),), 0):
        torch.testing.assert_close(value, x.double().var().float(), rtol=1e-3, atol=0)


def test_bfloat16_softmax_adds_up_in_float32() -> None:
    x = torch.zeros(3000, dtype=torch.bfloat16)
    pieces = [piece for piece, _ in run_form("softmax", torch.softmax, (x,), (S(0),), 0)]
    torch.testing.assert_close(torch.cat(pieces), x.softmax(0))


def test_mean_sends_nothing() -> None:
    assert {sent for _, sent in run_form("mean", torch.mean, (real(5, 7),), (S(0),), 0, out=P)} == {
        0
    }


def test_softmax_sends_two_numbers_a_row() -> None:
    few = {sent for _, sent in run_form("softmax", torch.softmax, (real(4, 300),), (S(1),), 1)}
    many = {sent for _, sent in run_form("softmax", torch.softmax, (real(4, 3000),), (S(1),), 1)}
    assert few == many and max(many) <= 2 * 2 * 4 * 8


def test_identity_loses_against_every_number() -> None:
    for dtype in (torch.float32, torch.int8, torch.uint8, torch.int64):
        least = torch.tensor(identity(dtype, "max"), dtype=dtype)
        most = torch.tensor(identity(dtype, "min"), dtype=dtype)
        assert least <= 0 <= most and (least < 0 or dtype == torch.uint8)
