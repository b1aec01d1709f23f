"""Calls that prove the rows of consistent/rules/{count,flat}.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples_index import distinct, places
from tests.consistent.rules.numbers import real, truth, unit, whole

NINE = torch.arange(9.0).double() - 4
_ROWS = real(5, 7).sort(1).values

_COUNTED = (
    example(torch.searchsorted, NINE, real(5, 4)),
    example(
        torch.searchsorted, torch.tensor([1, 1, 2, 2, 2, 5]), whole(5, low=0, high=6), right=True
    ),
    example(torch.searchsorted, _ROWS, real(5, 4), right=True, out_int32=True),
    example(torch.searchsorted, real(5, 7), real(5, 4), sorter=real(5, 7).argsort(1)),
    example(torch.searchsorted, NINE, 2.5),
    example(torch.bucketize, real(5, 4), NINE),
    example(torch.isin, places(6, 5, 4), places(6, 3)),
    example(torch.isin, places(6, 5), places(6, 2, 2), invert=True),
    example(torch.histc, real(5, 7), 4, -1, 1),
    example(torch.histc, real(5, 7), 4),
    example(torch.histc, torch.ones(2).double(), bins=3),
    example(torch.histogram, real(5, 7), 4),
    example(torch.histogram, real(5, 7), 4, range=(-1.0, 2.0), weight=unit(5, 7)),
    example(torch.histogram, real(2, 7), NINE, density=True),
)

_FLAT = (
    example(torch.take, real(5, 4), places(20, 7, 2)),
    example(torch.take, real(2, 4, 3), places(24, 7, negative=True)),
    example(torch.take, real(5), places(5)),
    example(torch.take_along_dim, real(5, 4), places(20, 7)),
    example(torch.Tensor.put, real(5, 4), places(20, 7, negative=True), real(7), True),
    example(torch.Tensor.put_, real(2, 4), distinct(8, 5).reshape(5, 1), real(5, 1)),
    example(torch.Tensor.put, real(5, 4, 2), distinct(40, 5), real(1, 5)),
    *(
        example(f, x, mask, real(40))
        for f in (torch.masked_scatter, torch.Tensor.masked_scatter_)
        for x, mask in (
            (real(5, 7), truth(5, 7)),
            (real(2, 3, 4), truth(3, 1)),
            (real(7), truth(7)),
        )
    ),
    example(torch.masked_scatter, real(5, 1), truth(5, 4), real(5, 4)),
)  # fmt: skip

EXAMPLES = (*_COUNTED, *_FLAT)
