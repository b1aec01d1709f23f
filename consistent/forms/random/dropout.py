"""Forms of all variants of dropout, and of rrelu.

Each mask or slope is a function of the element's logical index. In training every call takes a
random key on every rank, so that a rate of 0 advances the op counter like any other rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...movement.world import my_coordinate
from ...spec import Runs, TensorSpec
from ..native import load
from ..registry import Shards, form, write_if_inplace
from .draw import fill_uniform, key_from, key_of
from .generator import RngState


def apply_dropout(x: Tensor, p: float, spec: TensorSpec, key: RngState) -> Tensor:
    """Apply dropout to ``x``, the shard of a tensor with ``spec``; differentiable.

    A fraction ``p`` of the elements, chosen by ``key`` and their logical index, is set to zero, and
    the rest is divided by 1 - p.
    """
    if x.is_complex():
        return x * apply_dropout(torch.ones_like(x.real.detach()), p, spec, key)
    coordinate, sizes = my_coordinate(spec.placement), tuple(spec.shape)
    if spec.layout.is_cut:
        return apply_dropout_to_runs(x, p, spec.runs(coordinate), sizes, key)
    return _dropped_box(x, p, sizes, key, spec.region(coordinate)[0])


def apply_dropout_to_runs(
    x: Tensor,
    p: float,
    runs: Sequence[Runs],
    sizes: tuple[int, ...],
    key: RngState,
    starts: tuple[int, ...] = (),
) -> Tensor:
    """Apply dropout to a tensor that holds several index ranges of each dim of the logical tensor.

    Used for shards whose split has a cut, so that they are not one contiguous box. See
    ``apply_dropout``.

    Args:
        x: the tensor.
        p: the fraction to drop.
        runs: (start, size) of the index ranges of each dim that ``x`` holds.
        sizes: shape of the logical tensor.
        key: the random key, from which the mask is drawn.
        starts: starts of the first dims, for which ``x`` holds a single range; used by the
            recursion.
    """
    dim = len(starts)
    if dim == x.ndim:
        return _dropped_box(x, p, sizes, key, starts)
    pieces = x.split([size for _, size in runs[dim]], dim) if len(runs[dim]) > 1 else [x]
    firsts = [start for start, _ in runs[dim]] or [0]
    parts = [
        apply_dropout_to_runs(piece, p, runs, sizes, key, (*starts, first))
        for piece, first in zip(pieces, firsts, strict=True)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _dropped_box(
    x: Tensor, p: float, sizes: tuple[int, ...], key: RngState, starts: tuple[int, ...]
) -> Tensor:
    arguments = {"seed": key.seed, "counter": key.counter, "starts": starts, "logical_sizes": sizes}
    return load.dropout(x, p, **arguments)


def _drops_nothing(shard: Shards) -> bool:
    """Return whether the call drops nothing: its ``p`` is 0, or it is not in training.

    It takes a random key all the same, because p = 0 counts like any other p.
    """
    return shard.get("p", 0.5) == 0 or shard.get("train") is False


def _next_key(shard: Shards) -> RngState:
    """Return the random key of the call.

    If nothing is dropped, ranks need not have the same seed, so their seeds are not compared.
    """
    return key_from(None, shard.call.name, None if _drops_nothing(shard) else shard.placement)


@form("dropout")
def dropout(shard: Shards) -> Tensor:
    """Run torch.dropout on the shard, with a mask that is a function of the logical index."""
    key = _next_key(shard)
    if _drops_nothing(shard):
        return shard.tensors[0]
    return write_if_inplace(
        shard, apply_dropout(shard.tensors[0], shard.get("p", 0.5), shard.specs[0], key)
    )


@form("native_dropout")
def native_dropout(shard: Shards) -> tuple[Tensor, Tensor]:
    """Run native_dropout on the shard; return (x after dropout, boolean mask of kept elements)."""
    key, x = _next_key(shard), shard.tensors[0]
    ones = torch.ones(x.shape, dtype=torch.float32, device=x.device)
    if _drops_nothing(shard):
        return x * 1, ones.bool()
    p, spec = shard.get("p", 0.5), shard.specs[0]
    return apply_dropout(x, p, spec, key), apply_dropout(ones, p, spec, key).bool()


@form("feature_dropout")
def feature_dropout(shard: Shards) -> Tensor:
    """Drop whole channels: the mask is a function of the logical index in the first two dims."""
    key, x = _next_key(shard), shard.tensors[0]
    if _drops_nothing(shard):
        return x
    return write_if_inplace(shard, x * _feature_mask(shard, x, shard.get("p", 0.5), key))


def _feature_mask(shard: Shards, x: Tensor, p: float, key: RngState) -> Tensor:
    """Return a mask of 0 or 1 / (1 - p) for each sample and channel, as ``[n, c, 1, ...]``."""
    spec, rest = shard.specs[0], x.ndim - 2
    starts = spec.region(shard.coordinate)[0]
    ones = torch.ones((*x.shape[:2], *[1] * rest), dtype=_real_dtype(x.dtype), device=x.device)
    return load.dropout(
        ones,
        p,
        seed=key.seed,
        counter=key.counter,
        starts=(*starts[:2], *[0] * rest),
        logical_sizes=(*spec.shape[:2], *[1] * rest),
    )


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@form("alpha_dropout")
def alpha_dropout(shard: Shards) -> Tensor:
    """Run alpha_dropout, or feature_alpha_dropout, which drops whole channels.

    Dropped elements become -alpha, then all are scaled and shifted so that mean and variance are
    kept.
    """
    key, x, p = _next_key(shard), shard.tensors[0], shard.get("p", 0.5)
    if _drops_nothing(shard):
        return x
    if p == 1:  # the scale below would divide by zero
        return write_if_inplace(shard, x * torch.zeros_like(x))
    if shard.call.name == "alpha_dropout":
        ones = torch.ones(x.shape, dtype=_real_dtype(x.dtype), device=x.device)
        is_kept = apply_dropout(ones, p, shard.specs[0], key) != 0
    else:
        is_kept = _feature_mask(shard, x, p, key) != 0
    alpha = 1.7580993408473766  # SELU's scale * alpha, as in torch
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    noise = is_kept.to(_real_dtype(x.dtype))
    return write_if_inplace(shard, x * (noise * a) + ((noise - 1) * (alpha * a) + alpha * a * p))


@form("rrelu")
def rrelu(shard: Shards) -> Tensor:
    """Scale each element that is not positive by a slope drawn from [lower, upper)."""
    x = shard.tensors[0]
    slopes = torch.empty_like(x, requires_grad=False)
    key = key_of(shard)
    fill_uniform(slopes, shard.specs[0], key, shard.get("lower", 1 / 8), shard.get("upper", 1 / 3))
    return write_if_inplace(shard, torch.where(x <= 0, x * slopes, x))
