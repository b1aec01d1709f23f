"""The native ops, loaded and typed: random values that do not depend on how a tensor is cut.

Each value is a function of `seed`, `counter` and the element's row-major index in the logical
tensor. `starts` holds the first index that this rank has in each dim, `logical_sizes` the shape of
the whole; left out, the tensor is whole. CPU and CUDA give the same bits; `meta` is left alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    # Loading it registers torch.ops.consistent.
    from consistent.local import _C  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
except ImportError as error:
    raise ImportError(
        "consistent.local._C, the native part of this package, could not be loaded "
        f"({error}); build it with `make build`, or `pip install --no-build-isolation -e .`."
    ) from error

__all__ = [
    "bernoulli_",
    "cauchy_",
    "dropout",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "randint_",
    "randperm",
    "uniform_",
]

_ops = torch.ops.consistent
Ints = Sequence[int] | None


def _signed(number: int) -> int:
    """The same 64 bits as torch's `int` holds them: seeds reach up to 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _where(x: Tensor, seed: int, counter: int, starts: Ints, logical_sizes: Ints) -> tuple:
    if starts is None:
        starts = [0] * x.dim()
    return _signed(seed), counter, starts, x.shape if logical_sizes is None else logical_sizes


def uniform_(
    out: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with reals of [low, high), never high itself."""
    _ops.uniform_(out, low, high, *_where(out, seed, counter, starts, logical_sizes))
    return out


def normal_(
    out: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with normals."""
    _ops.normal_(out, mean, std, *_where(out, seed, counter, starts, logical_sizes))
    return out


def log_normal_(
    out: Tensor,
    mean: float = 1.0,
    std: float = 2.0,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with exp of normals of this mean and deviation."""
    _ops.log_normal_(out, mean, std, *_where(out, seed, counter, starts, logical_sizes))
    return out


def exponential_(
    out: Tensor,
    rate: float = 1.0,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with waiting times of this rate, each above 0."""
    _ops.exponential_(out, rate, *_where(out, seed, counter, starts, logical_sizes))
    return out


def cauchy_(
    out: Tensor,
    median: float = 0.0,
    scale: float = 1.0,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with Cauchy values."""
    _ops.cauchy_(out, median, scale, *_where(out, seed, counter, starts, logical_sizes))
    return out


def geometric_(
    out: Tensor,
    p: float,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with the number of trials up to the first success, 1 or more."""
    _ops.geometric_(out, p, *_where(out, seed, counter, starts, logical_sizes))
    return out


def bernoulli_(
    out: Tensor,
    p: float | Tensor = 0.5,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with ones of probability p, else zeros; a tensor p is cut like `out`."""
    op = _ops.bernoulli_tensor_ if isinstance(p, Tensor) else _ops.bernoulli_
    op(out, p, *_where(out, seed, counter, starts, logical_sizes))
    return out


def randint_(
    out: Tensor,
    low: int,
    high: int,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """Fills with integers of [low, high), in an integer, bool or floating dtype."""
    _ops.randint_(out, low, high, *_where(out, seed, counter, starts, logical_sizes))
    return out


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    seed: int,
    counter: int,
    starts: Ints = None,
    logical_sizes: Ints = None,
) -> Tensor:
    """x * keep / (1 - p); backward draws the same mask again instead of storing it."""
    return _ops.dropout(x, p, *_where(x, seed, counter, starts, logical_sizes))


def randperm(
    n: int, *, seed: int, counter: int, device: torch.device | str | None = None
) -> Tensor:
    """A permutation of 0 .. n-1 as int64, the same on every rank and device."""
    return _ops.randperm(n, _signed(seed), counter, device=torch.device(device) if device else None)


def _filled(out: Tensor, *_: object) -> None:
    """Nothing to do without data."""


def _register_fakes() -> None:
    fills = ("uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_")
    for name in (*fills, "bernoulli_", "bernoulli_tensor_", "randint_"):
        torch.library.register_fake(f"consistent::{name}", _filled)

    @torch.library.register_fake("consistent::dropout")
    def _(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("consistent::randperm")
    def _(n: int, *_: object, device: torch.device | None = None) -> Tensor:
        return torch.empty(n, dtype=torch.int64, device=device)


_register_fakes()
