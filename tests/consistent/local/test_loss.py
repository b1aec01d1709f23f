"""Facts about losses over split classes and rows."""

from __future__ import annotations

import pytest
import torch

from consistent.spec import B, S
from tests.consistent.local.form_runs import run_form
from tests.consistent.rules.numbers import real, whole

cross_entropy = torch._C._nn.cross_entropy_loss
MEAN, SUM = 1, 2


def test_split_classes_send_numbers_by_row_not_by_class() -> None:
    targets = whole(4, low=0, high=300)
    sent = []
    for classes in (300, 3000):
        made = run_form(
            "cross_entropy", cross_entropy, (real(4, classes), targets), (S(1), B), None, MEAN
        )
        sent.append({n for _, n in made})
    assert sent[0] == sent[1] and max(sent[0]) <= 2 * 3 * 4 * 8


def test_mean_divides_by_the_targets_that_are_not_ignored_anywhere() -> None:
    x, targets = real(6, 5), torch.tensor([0, -100, -100, 1, 2, 3])
    made = run_form("cross_entropy", cross_entropy, (x, targets), (S(0), S(0)), None, MEAN)
    torch.testing.assert_close(sum(y for y, _ in made), cross_entropy(x, targets, None, MEAN))


def test_all_targets_ignored_is_nan_as_in_torch() -> None:
    x, targets = real(6, 5), torch.full((6,), -100)
    made = run_form("cross_entropy", cross_entropy, (x, targets), (S(0), S(0)), None, MEAN)
    assert sum(y for y, _ in made).isnan()


def test_a_target_outside_the_classes_is_an_error() -> None:
    x, bad = real(2, 5), torch.tensor([1, 5])
    with pytest.raises((RuntimeError, IndexError)):
        run_form("cross_entropy", cross_entropy, (x, bad), (S(1), B), None, SUM)


def test_bfloat16_logits_give_a_bfloat16_loss_of_float32_sums() -> None:
    x, targets = real(3, 3000).to(torch.bfloat16), whole(3, low=0, high=3000)
    for y, _ in run_form("cross_entropy", cross_entropy, (x, targets), (S(1), B), None, SUM):
        torch.testing.assert_close(y, cross_entropy(x, targets, None, SUM))
