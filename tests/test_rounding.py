"""The bound holds for every order of adding, and is near enough to find a term that is missing."""

from __future__ import annotations

import pytest
import torch

from tests.rounding import assert_rounded, gamma
from tests.twins import randn


def test_the_sum_of_a_row_is_within_its_bound_in_any_order_and_not_without_a_term() -> None:
    x = randn(40, 300).float()
    exact, sizes = x.double().sum(1), x.double().abs().sum(1)
    for order in (x, x.flip(1), x.sort(1).values):
        total = torch.zeros(40)
        for column in order.unbind(1):
            total = total + column
        assert_rounded([total], [exact], [sizes], 300)
    with pytest.raises(AssertionError, match="0: .* too far apart"):
        assert_rounded([x[:, 1:].sum(1)], [exact], [sizes], 300)


def test_more_roundings_than_a_dtype_has_digits_are_refused() -> None:
    assert gamma(1, torch.float32) == pytest.approx(2**-24)
    with pytest.raises(AssertionError, match="has no digits left after 256 roundings"):
        gamma(256, torch.bfloat16)
