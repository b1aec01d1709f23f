"""How far from the exact value what a kernel computes may lie, on any processor.

Kernels of one product add in another order, with fused multiply-adds or without. Whatever they do,
a sum of products in which no term meets more than n roundings is no further from the exact sum than

    gamma_n * (the sum of the terms' absolute values),     gamma_n = n u / (1 - n u),

where u is half the distance from 1 to the next number of the dtype (N. J. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, SIAM 2002, lemma 3.1 and equation 3.5). For what is
made of sums and products alone the absolute values come from the same expression: it is computed
once more, of the absolute values of what it is given.

For tests whose subject is a dtype of few digits. What only proves a rule is compared in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gamma(roundings: int, dtype: torch.dtype) -> float:
    """The relative error that ``roundings`` roundings one after the other may add up to."""
    error = roundings * torch.finfo(dtype).eps / 2
    assert error < 1, f"{dtype} has no digits left after {roundings} roundings"
    return error / (1 - error)


def few_digits(x: Tensor) -> Tensor:
    """``x`` with six binary digits behind the point: in float32, products of such numbers below 16
    add up without a rounding, some ten of them at least."""
    return (x * 64).round() / 64


def assert_rounded(
    found: Sequence[Tensor], exact: Sequence[Tensor], sizes: Sequence[Tensor], roundings: int
) -> None:
    """Assert that each tensor of ``found`` is ``exact``, of float64 and the same shape, up to
    ``roundings`` roundings of terms whose absolute values add up to ``sizes``."""
    for i, (ours, value, size) in enumerate(zip(found, exact, sizes, strict=True)):
        assert ours.shape == value.shape, f"{i}: {ours.shape}, not {value.shape}"
        room = gamma(roundings, ours.dtype) * size.detach()
        gap = (ours.detach().double() - value.detach()).abs()
        assert bool((gap <= room).all()), f"{i}: {float((gap - room).max()):.2e} too far apart"
