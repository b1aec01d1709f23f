"""Calls that prove the rows of consistent/rules/order.py."""

from __future__ import annotations

import math

import torch

from tests.brute_force import example, fixed
from tests.consistent.rules.examples.numbers import complex_, real, truth, whole
from tests.consistent.rules.examples.reduce import MASKED, TIED, ZEROS

NAN = math.nan
# Ties, zeros of both signs, infinities and NaNs, within and across shards.
MIXED = torch.tensor(
    [3, NAN, 1, -0.0, 0, math.inf, 2, 2, -math.inf, NAN, 2, -5, 0, 7], dtype=torch.float64
)
HOLES = torch.tensor(
    [[3, NAN, 1, 4, 2], [NAN, 8, 1.5, 2.5, 9], [5, 0, 7, 1.2, 6]], dtype=torch.float64
)
# Which of several NaNs takes the gradient of a quantile depends on the release of torch.
HOLE = torch.where(HOLES.isnan() & (torch.arange(5) == 1), HOLES.new_tensor(0.5), HOLES)
# Nothing but -inf before, between and after numbers.
SPARSE = torch.tensor(
    [[-math.inf] * 3 + [1, 2, -math.inf, 3], [1, 2, -math.inf, 3, 4, 5, 6]], dtype=torch.float64
)

_SORTED = (
    *(example(f, real(5, 7), d) for f in (torch.sort, torch.argsort) for d in (0, -1)),
    *(example(f, real(13)) for f in (torch.sort, torch.argsort, torch.msort)),
    *(example(f, real(2, 7)) for f in (torch.sort, torch.argsort)),
    example(torch.msort, real(7, 2)),
    example(torch.sort, real(2)),
    example(torch.sort, real(300)),
    example(torch.sort, torch.zeros(300, dtype=torch.float64), stable=True),
    example(torch.sort, real(5, 7), stable=True, dim=0, descending=True),
    *(example(torch.sort, MIXED.to(t), stable=True) for t in (torch.float64, torch.bfloat16)),
    example(torch.sort, MIXED, stable=True, descending=True),
    *(
        example(torch.sort, x, stable=True, descending=d)
        for d in (False, True)
        for x in (whole(20, low=-3, high=3), truth(11), whole(9, low=0, dtype=torch.uint8))
    ),
    example(torch.topk, real(5, 13), 3),
    example(torch.topk, real(13, 2), 2, 0, False),
    example(torch.topk, real(12), 3),
    example(torch.topk, real(5, 7), 3),
    example(torch.topk, real(5, 7), 2, 0, False),
)

_SELECTED = (
    *(
        example(f, real(5, 7), *a)
        for f in (torch.median, torch.nanmedian)
        for a in ((), (0,), (1, True))
    ),
    *(example(f, HOLES, *a) for f in (torch.median, torch.nanmedian) for a in ((), (1,))),
    *(example(f, real(2), *a) for f in (torch.median, torch.nanmedian) for a in ((), (0,))),
    example(torch.median, TIED),
    example(torch.median, real()),
    example(torch.median, whole(5, 7)),
    example(torch.nanmedian, real(5, 3).bfloat16().double()),
    *(example(torch.mode, real(5, 7), *a) for a in ((), (0,))),
    example(torch.kthvalue, real(5, 7), 3),
    example(torch.kthvalue, real(5, 7), 2, 0, True),
    example(torch.kthvalue, real(300), 123),
    *(
        example(f, x, q, *a)
        for f, x in (
            (torch.quantile, fixed(HOLES)),
            (torch.quantile, HOLE),
            (torch.nanquantile, HOLES),
        )
        for q, *a in (
            (0.3,),
            (torch.tensor([0.2, 1.0]).double(), 1),
            (torch.tensor(0.7).double(), 0, True),
        )
    ),
    *(
        example(torch.quantile, real(5, 7).float(), torch.tensor([0.3, 0.9]), 0, interpolation=how)
        for how in ("lower", "higher", "midpoint", "nearest")
    ),
)

_SCANNED = (
    *(example(f, real(5, 7), d) for f in (torch.cumsum, torch.cumprod) for d in (0, -1)),
    *(example(f, whole(5, 7, low=-2, high=3), 0) for f in (torch.cumsum, torch.cumprod)),
    *(example(f, real(5, 7), 0) for f in (torch.Tensor.cumsum_, torch.Tensor.cumprod_)),
    example(torch.cumprod, ZEROS + 0, 1),
    example(torch.cumsum, real(), 0),
    example(torch.cumsum, complex_(5, 7), 0),
    *(
        example(f, x, d)
        for f in (torch.cummax, torch.cummin)
        for x, d in (
            (real(5, 7), 1),
            (real(2, 3), 0),
            (TIED, 1),
            (HOLES, 1),
            (MIXED, 0),
            (whole(5, 7), 0),
        )
    ),
    example(torch.cummax, truth(5, 7), 1),
    *(example(torch.logcumsumexp, x, 1) for x in (real(5, 7), real(3, 2), MASKED, SPARSE)),
)

_SUMMED = (
    *(example(torch.trapezoid, real(5, 7, 2), dim=d) for d in (0, 1)),
    example(torch.trapz, real(5, 7), dx=0.3),
    example(torch.trapezoid, real(5, 7), real(7)),
    example(torch.trapezoid, real(5, 7), real(5, 7), dim=0),
    example(torch.trapezoid, whole(5), dx=2),
)

EXAMPLES = (*_SORTED, *_SELECTED, *_SCANNED, *_SUMMED)
