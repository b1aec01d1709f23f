"""Calls that prove the rows of consistent/rules/linalg.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.numbers import real
from tests.rounding import few_digits
from tests.torch_release import IS_2_13


def _single(*shape: int) -> torch.Tensor:
    """float32: products of groups take no float64. Their sums are exact."""
    return few_digits(real(*shape).float())


def _eighth(*shape: int) -> torch.Tensor:
    """float8 of numbers whose products and sums float32 holds exactly."""
    return _single(*shape).to(torch.float8_e4m3fn)


def _scale(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.arange(torch.Size(shape).numel()).remainder(3).view(shape)


def _ends(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32)


# Of the CPU, since torch 2.13.
_SCALED_BY_ROWS = (
    (
        example(
            torch._scaled_mm,
            _eighth(5, 16),
            _eighth(96, 16).t(),
            _scale(5, 1),
            _scale(1, 96),
            _single(96).bfloat16(),
            out_dtype=torch.bfloat16,
        ),
        example(
            torch._scaled_mm_v2,
            _eighth(5, 16),
            _eighth(96, 16).t(),
            [_scale()],
            [0],
            [],
            [_scale()],
            [0],
            [],
            None,
            torch.float32,
        ),
    )
    if IS_2_13
    else ()
)

EXAMPLES = (
    example(torch._grouped_mm, _single(7, 8), _single(4, 8, 4), offs=_ends(2, 2, 3, 7)),
    example(torch._grouped_mm, _single(5, 4), _single(2, 4, 8), _ends(3, 5)),
    example(torch._grouped_mm, _single(2, 5, 8), _single(8, 8), offs=_ends(3, 8)),
    example(torch._grouped_mm, _single(5, 8), _single(8, 8), offs=_ends(4, 4, 8)),
    example(torch._grouped_mm, _single(4, 5, 8), _single(4, 8, 4)),
    example(
        torch._scaled_mm,
        _eighth(5, 16),
        _eighth(96, 16).t(),
        _scale(),
        _scale(1),
        out_dtype=torch.float32,
    ),
    *_SCALED_BY_ROWS,
    example(torch.addbmm, real(5, 2), real(4, 5, 3), real(4, 3, 2)),
    example(torch.addbmm, real(2), real(4, 5, 3), real(4, 3, 2), beta=2, alpha=3),
    example(torch.addmm, real(5, 7), real(5, 4), real(4, 7)),
    example(torch.addmm, real(7), real(5, 4), real(4, 7), beta=0.5, alpha=2),
    example(torch.addmm, real(5, 1), real(5, 4), real(4, 7)),
    example(torch.Tensor.addmm_, real(5, 7), real(5, 4), real(4, 7)),
    example(torch._addmm_activation, real(7), real(5, 4), real(4, 7)),
    example(torch.addmv, real(5), real(5, 7), real(7)),
    example(torch.addmv, real(1), real(5, 7), real(7)),
    example(torch.addr, real(5, 7), real(5), real(7)),
    example(torch.addr, real(7), real(5), real(7)),
    example(torch.baddbmm, real(4, 5, 2), real(4, 5, 3), real(4, 3, 2)),
    example(torch.baddbmm, real(5, 1), real(4, 5, 3), real(4, 3, 2)),
    example(torch.bilinear, real(5, 2), real(5, 4), real(7, 2, 4), real(7)),
    example(torch.bilinear, real(3, 5, 2), real(3, 5, 4), real(7, 2, 4)),
    example(torch.bmm, real(4, 5, 3), real(4, 3, 2)),
    example(torch.dot, real(7), real(7)),
    example(torch.vdot, real(7), real(7)),
    example(torch._VF.einsum, "bij, bjk -> bik", [real(4, 5, 3), real(4, 3, 2)]),
    example(torch._VF.einsum, "...ij,kj", [real(2, 5, 3), real(4, 3)]),
    example(torch._VF.einsum, "ii->i", [real(5, 5)]),
    example(torch._VF.einsum, "ij,jk,kl->il", [real(5, 3), real(3, 4), real(4, 2)]),
    example(torch._C._nn.linear, real(2, 5, 4), real(7, 4), real(7)),
    example(torch._C._nn.linear, real(5, 4), real(7, 4)),
    example(torch._C._nn.linear, real(4), real(7, 4), real(7)),
    example(torch.matmul, real(5, 4), real(4, 7)),
    example(torch.matmul, real(4), real(4)),
    example(torch.matmul, real(4), real(4, 7)),
    example(torch.matmul, real(5, 4), real(4)),
    example(torch.matmul, real(2, 5, 4), real(4, 7)),
    example(torch.matmul, real(2, 5, 4), real(4)),
    example(torch.matmul, real(4), real(2, 4, 5)),
    example(torch.matmul, real(3, 1, 5, 4), real(2, 4, 7)),
    example(torch.mm, real(5, 4), real(4, 7)),
    example(torch.mv, real(5, 4), real(4)),
    example(torch.outer, real(5), real(7)),
    example(torch.ger, real(5), real(7)),
    example(torch._VF.tensordot, real(5, 4, 3), real(3, 4, 7), [2, 1], [0, 1]),
    example(torch._VF.tensordot, real(5, 4), real(2, 4), [1], [-1]),
)
