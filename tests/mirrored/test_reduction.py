from __future__ import annotations

import pytest
import torch

from mirrored import ordered_reduce


def test_bfloat16_sums_are_rounded_once() -> None:
    pieces = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.ones(1).bfloat16()] * 8
    assert ordered_reduce(pieces).item() == 264  # step by step each 256 + 1 rounds to 256


def test_inputs_are_left_alone() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert ordered_reduce([a, b]).tolist() == [2, 2]
    assert a.tolist() == [1, 1]


def test_bool_sum_is_or_and_min_is_and() -> None:
    a, b = torch.tensor([True, False, True]), torch.tensor([True, False, False])
    assert ordered_reduce([a, b], "sum").tolist() == [True, False, True]
    assert ordered_reduce([a, b], "min").tolist() == [True, False, False]


def test_complex_numbers_have_no_max() -> None:
    with pytest.raises(ValueError, match="no order"):
        ordered_reduce([torch.ones(1, dtype=torch.complex64)] * 2, "max")


def test_unsigned_sums_wrap() -> None:
    pieces = [torch.tensor([65535], dtype=torch.uint16), torch.tensor([2], dtype=torch.uint16)]
    assert ordered_reduce(pieces).tolist() == [1]
