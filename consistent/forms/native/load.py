"""Typed wrappers of the native ops, and their fake (meta) implementations.

Random values do not depend on the layout of a tensor. Each is a function of ``seed``, ``counter``
and the element's row-major index in the logical tensor. ``starts`` is this rank's first index in
each dim, and ``logical_sizes`` is the shape of the logical tensor; without them ``out`` is the
whole tensor. CPU and CUDA give the same bits; ``meta`` tensors stay as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..seeds import signed_seed

__all__ = [
    "bernoulli_",
    "cauchy_",
    "dropout",
    "exponential_",
    "geometric_",
    "log_normal_",
    "masked_embedding",
    "masked_embedding_backward",
    "normal_",
    "randint_",
    "randperm",
    "reduce_shards",
    "split_cross_entropy",
    "split_cross_entropy_backward",
    "streamed_copy_",
    "uniform_",
]

_ops = torch.ops.consistent
Ints = Sequence[int] | None


def _random_arguments(
    x: Tensor, seed: int, counter: int, starts: Ints, logical_sizes: Ints
) -> tuple:
    """Return the arguments (seed, counter, starts, logical sizes) of a random native op on ``x``.

    Without ``starts`` or ``logical_sizes``, ``x`` counts as the whole tensor.
    """
    if starts is None:
        starts = [0] * x.dim()
    return signed_seed(seed), counter, starts, x.shape if logical_sizes is None else logical_sizes


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
    """Fill ``out`` with uniform numbers of [low, high), never ``high`` itself.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.uniform_(out, low, high, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with normally distributed values of this mean and standard deviation.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.normal_(out, mean, std, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with exp of normal values of this mean and standard deviation.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.log_normal_(out, mean, std, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with values of the exponential distribution of this rate, each above 0.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.exponential_(out, rate, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with values of the Cauchy distribution of this median and scale.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.cauchy_(out, median, scale, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with numbers of trials, of success ``p``, up to the first success: 1 or more.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.geometric_(out, p, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out`` with ones with probability ``p``, else zeros.

    A tensor ``p`` has one probability per element of ``out``, and is this rank's shard as ``out``
    is.

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    op = _ops.bernoulli_tensor_ if isinstance(p, Tensor) else _ops.bernoulli_
    op(out, p, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Fill ``out``, of an integer, bool or floating dtype, with integers of [low, high).

    The numbers depend on ``seed``, ``counter`` and the logical index only. ``starts`` and
    ``logical_sizes`` say where ``out`` lies in the logical tensor; by default ``out`` is all of it.
    """
    _ops.randint_(out, low, high, *_random_arguments(out, seed, counter, starts, logical_sizes))
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
    """Return ``x * keep / (1 - p)`` with a random mask ``keep`` of zeros and ones.

    Backward draws the same mask again instead of storing it. The mask depends on ``seed``,
    ``counter`` and the logical index only. ``starts`` and ``logical_sizes`` say where ``x`` lies in
    the logical tensor; without them ``x`` is the whole tensor.
    """
    return _ops.dropout(x, p, *_random_arguments(x, seed, counter, starts, logical_sizes))


def randperm(
    n: int, *, seed: int, counter: int, device: torch.device | str | None = None
) -> Tensor:
    """Return a permutation of 0 .. n-1 as int64, the same on every rank and device.

    ``seed`` and ``counter`` determine it.
    """
    return _ops.randperm(
        n, signed_seed(seed), counter, device=torch.device(device) if device else None
    )


def reduce_shards(
    parts: Sequence[Tensor], dim: int, start: int, size: int, **epilogue: Any
) -> tuple[Tensor, Tensor]:
    """Sum the slice [start, start + size) of ``dim`` over ``parts``, and apply an epilogue.

    Returns (norm(activation(total)), total), where total is scale * sum of parts + bias + residual.
    The returned total is empty unless ``keep_total``. All is done in one pass. The parts are added
    in order, in float32 (float64 for float64). ``epilogue``: scale, bias, residual, activation
    ("relu", "gelu", "gelu_tanh", "silu"), norm ("layer", "rms") over the last ``normalized`` dims,
    weight, norm_bias, eps, keep_total, dtype.
    """
    return _ops.reduce_shards(parts, dim, start, size, **epilogue)


def split_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, dim: int, start: int, smooth: bool
) -> Tensor:
    """Return numbers of each row over this rank's classes, from which cross entropy is computed.

    The classes begin at ``start``. The result is [3, rows], or [5, rows] if ``smooth``: the largest
    logit m; the sum of exp(x - r), with r = m, or 0 where m is -inf; x[target], or 0 where another
    rank holds it; the sum of weight * (x - r); the sum of weight. It is in float32, or float64 for
    float64 logits.
    """
    return _ops.split_cross_entropy(logits, target, weight, dim, start, smooth)


def split_cross_entropy_backward(
    logits: Tensor, target: Tensor, rows: Tensor, weight: Tensor | None, dim: int, start: int
) -> Tensor:
    """Return the gradient of this rank's logits in cross entropy, split by classes.

    It is exp(logits - r) * scale - weight * shift, minus pick at the target. ``rows`` has four
    numbers of each row, as [4, rows]: r, scale, shift, pick. The classes begin at ``start``.
    """
    return _ops.split_cross_entropy_backward(logits, target, rows, weight, dim, start)


def masked_embedding(table: Tensor, index: Tensor, start: int, scale: float = 1.0) -> Tensor:
    """Look rows up in this rank's part of a table; rows of other ranks are zeros.

    Returns scale * table[index - start]. The shapes are [held, width], [...] -> [..., width], and
    ``start`` is the first row that this rank holds.
    """
    return _ops.masked_embedding(table, index, start, scale)


def masked_embedding_backward(
    gradient: Tensor,
    index: Tensor,
    rows: int,
    start: int,
    padding_idx: int = -1,
    by_count: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Return the gradient of this rank's rows of a table from ``gradient``, that of the look-ups.

    The shapes are [..., width], [...] -> [rows, width]. Each row gets scale * the sum of its
    look-ups' gradients, in order, divided by their number if ``by_count``. Row ``padding_idx`` gets
    none. ``start`` is the first row that this rank holds.
    """
    return _ops.masked_embedding_backward(
        gradient, index, rows, start, padding_idx, by_count, scale
    )


def streamed_copy_(out: Tensor, source: Tensor) -> Tensor:
    """Copy a contiguous CPU tensor into another of its dtype and shape, bypassing CPU caches.

    It is for large blocks that are not read soon. Returns ``out``.
    """
    _ops.streamed_copy_(out, source)
    return out


def _fake_fill(out: Tensor, *_: object) -> None:
    """Fake implementation of ops that fill their first argument in place: it does nothing.

    Fake tensors have no values to fill in.
    """


def _register_fakes_of_random_ops() -> None:
    fills = ("uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_")
    for name in (*fills, "bernoulli_", "bernoulli_tensor_", "randint_", "streamed_copy_"):
        torch.library.register_fake(f"consistent::{name}", _fake_fill)

    @torch.library.register_fake("consistent::dropout")
    def _(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("consistent::randperm")
    def _(n: int, *_: object, device: torch.device | None = None) -> Tensor:
        return torch.empty(n, dtype=torch.int64, device=device)


def _register_fakes_of_kernels() -> None:
    @torch.library.register_fake("consistent::masked_embedding")
    def _(table: Tensor, index: Tensor, *_: object) -> Tensor:
        return table.new_empty((*index.shape, table.shape[1]))

    @torch.library.register_fake("consistent::masked_embedding_backward")
    def _(gradient: Tensor, index: Tensor, rows: int, *_: object) -> Tensor:
        return gradient.new_empty((rows, gradient.shape[-1]))

    @torch.library.register_fake("consistent::reduce_shards")
    def _(
        parts: Sequence[Tensor],
        dim: int,
        start: int,
        size: int,
        *,
        keep_total: bool = False,
        dtype: torch.dtype | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        shape = [*parts[0].shape]
        shape[dim] = size
        out = parts[0].new_empty(shape, dtype=dtype or parts[0].dtype)
        return out, out.new_empty(shape if keep_total else [0])

    @torch.library.register_fake("consistent::split_cross_entropy")
    def _(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return logits.new_empty((5 if rest[-1] else 3, *target.shape), dtype=dtype)

    @torch.library.register_fake("consistent::split_cross_entropy_backward")
    def _(logits: Tensor, *_: object) -> Tensor:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)


_register_fakes_of_random_ops()
_register_fakes_of_kernels()
