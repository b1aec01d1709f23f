from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent.rules.notation.strides import kept_dim_positions


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        (lambda x: x.permute(2, 0, 1), (5, 4, 3), {0: (1,), 1: (2,), 2: (0,)}),
        (lambda x: x[:, 1:3], (5, 4), {0: (0,)}),
        (lambda x: x[::2, 1], (5, 4, 3), {2: (1,)}),
        (lambda x: x.diagonal(), (5, 4, 3), {2: (0,)}),
        (lambda x: x.expand(2, 5, 4), (5, 1), {0: (1,)}),
        (lambda x: x.split(2, 0), (5, 4), {1: (1, 1, 1)}),
        # Which of two dims of size 1 is the old one cannot be told, so neither is kept.
        (lambda x: x.unsqueeze(0), (1, 4), {1: (2,)}),
    ],
)
def test_kept_dims_are_read_off_strides(
    view: Callable, shape: tuple[int, ...], expected: dict
) -> None:
    assert kept_dim_positions(view, shape) == expected


def test_no_arithmetic_on_strides_makes_another_dims_stride() -> None:
    x = torch.empty(2, 2, 2, 2, 2)
    assert kept_dim_positions(lambda x: x.diagonal(0, 0, 1).unsqueeze(0), x.shape) == {
        2: (1,),
        3: (2,),
        4: (3,),
    }
