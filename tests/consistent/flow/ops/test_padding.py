"""SAME and VALID padding against the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import consistent.flow as flow
from consistent.flow.ops.padding import pad_same, pair
from tests import strategies  # noqa: F401  (loads the profile)


def by_hand(x: torch.Tensor, kernel: int, stride: int, dilation: int) -> torch.Tensor:
    """The largest value of each window of a row, placed by the definition of SAME."""
    n, reach = len(x), (kernel - 1) * dilation + 1
    count = -(-n // stride)
    start = -(max((count - 1) * stride + reach - n, 0) // 2)
    found = []
    for k in range(count):
        at = [start + k * stride + tap * dilation for tap in range(kernel)]
        found.append(max((x[i].item() for i in at if 0 <= i < n), default=-torch.inf))
    return torch.tensor(found)


@given(
    n=st.integers(1, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 2),
)
def test_same_gives_the_windows_of_its_definition(
    n: int, kernel: int, stride: int, dilation: int
) -> None:
    row = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x = row.view(1, 1, n, 1)
    padded, pads = pad_same(x, "SAME", (kernel, 1), (stride, 1), (dilation, 1), float("-inf"))
    if any(pads):
        padded, pads = (
            F.pad(padded, (pads[1], pads[1], pads[0], pads[0]), value=float("-inf")),
            (0, 0),
        )
    found = F.max_pool2d(padded, (kernel, 1), (stride, 1), 0, (dilation, 1))
    assert torch.equal(found.flatten(), by_hand(row, kernel, stride, dilation))


def test_valid_adds_nothing() -> None:
    x = torch.ones(1, 1, 5, 5)
    assert pad_same(x, "VALID", (3, 3), (2, 2)) == (x, (0, 0))
    assert flow.nn.max_pool2d(x, 3, 2, "VALID").shape == (1, 1, 2, 2)


def test_another_word_is_an_error() -> None:
    with pytest.raises(ValueError, match='"SAME" .* and "VALID"'):
        pad_same(torch.ones(1, 1, 2, 2), "same", (1, 1), (1, 1))


def test_one_size_stands_for_both_dims() -> None:
    assert pair(3) == (3, 3) and pair([1, 2]) == (1, 2)
