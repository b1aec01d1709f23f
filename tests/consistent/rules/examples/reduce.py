"""Calls that prove the rows of consistent/rules/reduce.py."""

from __future__ import annotations

import math

import torch

from tests.brute_force import example, fixed
from tests.consistent.rules.examples.numbers import complex_, real, truth, unit, whole

# Ties within and across shards, a row that is masked out on some ranks, infinities and a NaN.
TIED = torch.tensor(
    [[1.0, 3, 3, 0, 3, 2, 1], [2, 2, 2, 2, 2, 2, 2], [5, 0, 0, 0, 0, 0, 5]], dtype=torch.float64
)
MASKED = torch.tensor(
    [[-math.inf, -math.inf, 1, 2, 3, 4, 5], [1, 2, 3, -math.inf, 4, 5, 6]], dtype=torch.float64
)
BROKEN = torch.tensor(
    [[1.0, 2, 3, math.nan, 5], [math.inf, 1, 2, 3, -math.inf]], dtype=torch.float64
)
ZEROS = torch.tensor([[0.0, 0, 0, 0, 0], [1, 0, -2, 0, 3]], dtype=torch.float64)

REDUCED = (
    torch.sum,
    torch.nansum,
    torch.mean,
    torch.nanmean,
    torch.amax,
    torch.amin,
    torch.logsumexp,
)
AMONG = (torch.max, torch.min, torch.argmax, torch.argmin)
SPREAD = (torch.var, torch.std, torch.var_mean, torch.std_mean)
VECTOR = torch.linalg.vector_norm

EXAMPLES = (
    *(example(f, real(5, 7, 2), (0, 2), keepdim=k) for f in REDUCED for k in (False, True)),
    *(example(f, real(5, 7), -1) for f in (*REDUCED, torch.prod, *AMONG)),
    *(example(f, real(5, 7), 0, True) for f in (*REDUCED, torch.prod, *AMONG)),
    *(
        example(f, real(5, 7))
        for f in (torch.sum, torch.mean, torch.prod, torch.amax, *AMONG, torch.aminmax)
    ),
    *(example(f, TIED, d) for f in (torch.amax, torch.amin, *AMONG) for d in (0, 1)),
    *(example(f, TIED) for f in (torch.amax, torch.amin, *AMONG, torch.aminmax)),
    *(example(f, BROKEN, 1) for f in (torch.sum, torch.nansum, torch.nanmean, *AMONG)),
    *(example(f, BROKEN) for f in (torch.max, torch.min)),
    *(
        example(f, whole(5, 7, low=-2, high=3), 0)
        for f in (torch.sum, torch.prod, torch.amax, *AMONG)
    ),
    *(
        example(f, real())
        for f in (torch.sum, torch.mean, torch.amax, torch.argmax, torch.var_mean)
    ),
    *(
        example(f, complex_(5, 7), 0)
        for f in (torch.sum, torch.mean, torch.prod, torch.var, torch.cumsum)
    ),
    example(torch.sum, whole(5, 7), dtype=torch.float64),
    example(torch.sum, truth(5, 7), 1),
    example(torch.sum, real(5, 1), 1),
    example(torch.mean, whole(5, 7), 0, dtype=torch.float64),
    example(torch.prod, ZEROS, 1),
    example(torch.logsumexp, MASKED, 1),
    example(torch.ops.aten.special_logsumexp.default, real(5, 4), [1]),
    example(torch.ops.aten.special_softmax.default, real(5, 4), 1),
    example(torch.logsumexp, MASKED, 0),
    example(torch.all, truth(5, 7)),
    example(torch.any, truth(5, 7) & truth(5, 7), 1),
    example(torch.all, whole(5, 7, low=0, high=3, dtype=torch.uint8), 0, True),
    example(torch.any, real(5, 7), (0, 1)),
    example(torch.max, real(5, 7), real(7)),
    example(torch.min, real(5, 1), real(5, 7)),
    example(torch.max, truth(5, 7), 1),
    example(torch.argmax, real(5, 7, 3), keepdim=True),
    example(torch.aminmax, TIED, dim=1),
    example(torch.aminmax, real(5, 7), dim=0, keepdim=True),
    example(torch.count_nonzero, whole(5, 7, low=0, high=2)),
    example(torch.count_nonzero, whole(5, 7, low=0, high=2), 1),
    *(example(f, real(5, 7, 2), (0, 2)) for f in SPREAD),
    *(example(f, real(5, 7), 1, keepdim=True) for f in SPREAD),
    *(example(f, real(5, 7)) for f in SPREAD),
    example(torch.var, real(5, 7), False),
    example(torch.var, real(5, 7), 0, False, True),
    example(torch.std, real(5, 7), dim=0, correction=2),
    example(torch.std, torch.ones(5, 7, dtype=torch.float64), 0),
    example(torch.var, real(1, 5), 0),
    *(
        example(VECTOR, real(5, 7, 2), p, (0, 1))
        for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf, -1)
    ),
    *(example(VECTOR, ZEROS, p, 1, True) for p in (1, 2, 3, math.inf, -math.inf)),
    example(VECTOR, real(5, 7)),
    example(VECTOR, complex_(5, 7), 2, 1),
    example(torch._VF.norm, real(5, 7), 2),
    example(torch._VF.norm, real(5, 7), 1, [0]),
    example(torch._VF.norm, real(5, 7), math.inf, [1], keepdim=True),
    example(torch._VF.frobenius_norm, real(5, 7), [0, 1]),
    example(torch._C._nn.glu, real(5, 4, 6), 1),
    example(torch.cosine_similarity, real(5, 7, 3), real(5, 7, 3)),
    example(torch.cosine_similarity, real(5, 7), real(5, 7), -1, 1e-2),
    example(torch.cosine_similarity, real(5, 7), real(7)),
    example(torch.pairwise_distance, real(5, 7, 3), real(5, 7, 3), 1.5),
    example(torch.pairwise_distance, real(5, 7), real(5, 7), keepdim=True),
    example(torch._C._nn.glu, real(5, 4)),
    *(
        example(f, fixed(real(5, 7)), d)
        for f in (torch.amax, torch.logsumexp, torch.softmax, torch.log_softmax)
        for d in (0, 1)
    ),
    example(torch.softmax, fixed(MASKED), 1),
    example(torch.amin, fixed(BROKEN), 1),
    example(torch.linalg.norm, real(5, 7)),
    example(torch.linalg.norm, real(5, 7), dim=1),
    example(torch.linalg.norm, real(4, 5, 7), "fro", (1, 2)),
    example(torch.linalg.norm, real(4, 5, 7), 1, (1, 2)),
    example(torch.linalg.norm, real(4, 5, 7), "nuc", (1, 2)),
    example(torch.linalg.norm, real(7), 3),
    example(torch.linalg.norm, real(5, 7), 2),
    example(torch.linalg.matrix_norm, real(4, 5, 7)),
    example(torch.linalg.matrix_norm, real(4, 5, 7), math.inf, keepdim=True),
    *(example(f, real(5, 7), d) for f in (torch.softmax, torch.log_softmax) for d in (0, 1)),
    *(example(f, MASKED, 1) for f in (torch.softmax, torch.log_softmax)),
    *(example(f, real(2, 5, 2), -2) for f in (torch.softmax, torch.log_softmax)),
    example(torch.Tensor.softmax, unit(5, 7).float(), -1, dtype=torch.float64),
    example(torch.softmax, real(), 0),
    example(torch._softmax, real(5, 7), 1, False),
    example(torch._log_softmax, real(5, 7), 1, False),
    example(torch.special.log_softmax, real(5, 7), 1),
    example(torch.renorm, real(5, 7, 2), 2, 1, 0.5),
)
