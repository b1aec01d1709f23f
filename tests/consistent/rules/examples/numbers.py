"""Example tensors, the same at each run, in float64: what differs is wrong and not rounded."""

from __future__ import annotations

import torch

_random = torch.Generator().manual_seed(1)


def real(*shape: int) -> torch.Tensor:
    """Normal random numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=_random)


def unit(*shape: int) -> torch.Tensor:
    """Numbers in (0.05, 0.95)."""
    return 0.05 + 0.9 * torch.rand(shape, dtype=torch.float64, generator=_random)


def whole(
    *shape: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Integers from `low` up to below `high`."""
    return torch.randint(low, high, shape, generator=_random).to(dtype)


def truth(*shape: int) -> torch.Tensor:
    """Bools."""
    return torch.rand(shape, generator=_random) < 0.5


def complex_(*shape: int) -> torch.Tensor:
    """Complex normal random numbers."""
    return torch.randn(shape, dtype=torch.complex128, generator=_random)
