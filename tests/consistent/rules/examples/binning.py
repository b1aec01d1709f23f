"""Calls that prove the rows of consistent/rules/{count,counted,flat}.py."""

from __future__ import annotations

import math

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.indexing import distinct, places
from tests.consistent.rules.examples.numbers import real, truth, unit, whole

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

_FEW = whole(5, 7, low=0, high=6)

# Results as long as the data says: nothing found, all of it on one rank, found everywhere.
_AS_MANY = (
    *(
        example(f, x)
        for f in (torch.nonzero, torch.argwhere)
        for x in (truth(5, 7), truth(7), torch.zeros(5, 2), torch.arange(9) > 6, real(2, 3))
    ),
    example(torch.nonzero, truth(5, 7), as_tuple=True),
    example(torch.where, truth(5, 7)),
    *(
        example(torch.masked_select, real(*mask.shape), mask)
        for mask in (truth(5, 7), truth(7), torch.zeros(5) > 0, torch.arange(9) > 6, truth(2, 3, 2))
    ),
    *(
        example(torch._unique2, _FEW, return_inverse=i, return_counts=c)
        for i in (False, True)
        for c in (False, True)
    ),
    example(torch._unique2, torch.tensor([2.0, math.nan, 1, math.nan, 2]).double(), True, True),
    example(torch._unique2, _FEW[:2, 0], True, True, True),
    example(torch.bincount, _FEW[:, 0]),
    example(torch.bincount, _FEW.reshape(-1), unit(35), minlength=9),
    example(torch.bincount, _FEW[:2, 1], unit(2).float()),
    example(torch.bincount, _FEW[:, 0], _FEW[:, 1]),
)  # fmt: skip

_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_TEN = torch.arange(35).reshape(5, 7) % 3 == 0  # 12 of 35
_TWO = torch.arange(5) % 3 == 1

_MASKED = (
    example(_get, real(5, 7), _TEN),
    example(_get, real(5, 7, 3), _TEN),
    example(_get, real(5, 7, 3), _TWO),
    example(_get, real(2, 7), torch.tensor([False, True])),
    example(_set, real(5, 7), _TEN, 2.5),
    example(_set, real(5, 7, 3), _TEN, real()),
    example(_set, real(5, 7, 3), _TWO, real(7, 3)),
    example(_set, real(5, 7, 3), _TWO, real(1, 7, 1)),
    example(_set, real(5, 7), _TEN, real(12)),
    example(_set, real(5, 7, 3), _TEN, real(12, 3)),
    example(_set, real(5, 7, 3), _TWO, real(2, 7, 3)),
    example(_set, real(2, 3), torch.tensor([False, True]), real(1, 3)),
)

EXAMPLES = (*_COUNTED, *_MASKED, *_AS_MANY, *_FLAT)
