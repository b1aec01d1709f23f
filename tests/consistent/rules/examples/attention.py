"""Calls that prove the rows of consistent/rules/attention.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.numbers import real, truth
from tests.consistent.rules.examples.random import drawn

attend = torch._C._nn.scaled_dot_product_attention
_SEES_ITSELF = truth(4, 5) | torch.eye(4, 5, dtype=torch.bool)

EXAMPLES = (
    example(attend, real(2, 5, 4, 3), real(2, 5, 6, 3), real(2, 5, 6, 7)),
    example(attend, real(5, 4, 3), real(5, 6, 3), real(5, 6, 2), scale=0.3),
    example(attend, real(4, 3), real(6, 3), real(6, 5)),
    example(attend, real(2, 4, 4, 3), real(2, 4, 4, 3), real(2, 4, 4, 3), is_causal=True),
    example(attend, real(2, 4, 4, 3), real(2, 4, 4, 3), real(2, 4, 4, 3), None, 0.0, True),
    example(attend, real(2, 4, 4, 3), real(2, 4, 5, 3), real(2, 4, 5, 3), real(2, 4, 4, 5)),
    example(attend, real(2, 4, 4, 3), real(2, 4, 5, 3), real(2, 4, 5, 3), real(4, 5), 0.0),
    example(attend, real(2, 4, 4, 3), real(2, 4, 5, 3), real(2, 4, 5, 3), real(2, 1, 1, 5)),
    example(attend, real(2, 4, 4, 3), real(2, 4, 5, 3), real(2, 4, 5, 3), _SEES_ITSELF),
    example(attend, real(2, 4, 4, 3), real(1, 4, 5, 3), real(1, 4, 5, 3)),
    example(attend, real(2, 12, 4, 3), real(2, 12, 5, 3), real(2, 12, 5, 3), enable_gqa=True),
    example(attend, real(2, 24, 4, 3), real(2, 12, 5, 3), real(2, 12, 5, 3), enable_gqa=True),
    example(attend, real(2, 6, 4, 3), real(2, 2, 5, 3), real(2, 2, 5, 3), enable_gqa=True),
    example(attend, real(2, 6, 4, 3), real(2, 1, 5, 3), real(2, 1, 5, 3), enable_gqa=True),
    # Rows and keys that leave a rank empty, and rows beyond the last key.
    example(attend, real(2, 2, 3), real(2, 7, 3), real(2, 7, 4), is_causal=True),
    example(attend, real(2, 7, 3), real(2, 2, 3), real(2, 2, 4), is_causal=True, scale=0.2),
    example(attend, real(2, 1, 3), real(2, 7, 3), real(2, 7, 4), truth(2, 1, 7)),
    example(
        attend,
        real(2, 6, 5, 3),
        real(2, 2, 5, 3),
        real(2, 2, 5, 3),
        is_causal=True,
        enable_gqa=True,
    ),
    drawn(attend, real(2, 5, 4, 3), real(2, 5, 6, 3), real(2, 5, 6, 7), None, 0.3),
    drawn(
        attend, real(2, 4, 4, 3), real(2, 4, 4, 3), real(2, 4, 4, 3), dropout_p=0.3, is_causal=True
    ),
    drawn(
        attend,
        real(2, 6, 4, 3),
        real(2, 1, 5, 3),
        real(2, 1, 5, 3),
        real(4, 5),
        0.3,
        enable_gqa=True,
    ),
    drawn(
        attend,
        real(2, 24, 4, 3),
        real(2, 12, 5, 3),
        real(2, 12, 5, 3),
        dropout_p=0.3,
        enable_gqa=True,
    ),
    drawn(attend, real(2, 4, 4, 3), real(1, 4, 5, 3), real(1, 4, 5, 3), dropout_p=0.3),
)
