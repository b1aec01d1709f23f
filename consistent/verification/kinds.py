"""Name what is wrong with a tensor, from the values of the ranks and the value of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .held import join_parts

MAX_SLICES = 4096  # most slices that are compared one by one

Near = Callable[[Tensor, Tensor], bool]  # whether a value differs from another by rounding only


def kind_of(
    values: Sequence[Tensor], right: Tensor, n: int, near: Near, before: Tensor | None = None
) -> str:
    """Return a phrase for what is wrong, such as ``a shard taken for the whole``.

    Args:
        values: the values of all ranks, if each should have the whole tensor; otherwise the one
            tensor that their shards make up.
        right: the value of one process.
        n: the number of ranks.
        near: whether two tensors differ by rounding only.
        before: the value that this tensor had on one process a step earlier, if any.
    """
    value = values[0]
    if value.shape != right.shape:
        return _phrase_for_shape(values, right, near)
    if not all(bool(v.isfinite().all()) for v in values) and bool(right.isfinite().all()):
        return "a value that is not finite"
    if all(not v.any() for v in values) and right.any():
        return "a value that is missing: zeros"
    if any(not near(v, value) for v in values[1:]):
        return _phrase_for_ranks(values, right, near)
    if before is not None and near(value, before):
        return "a stale value: that of the step before"
    if before is not None and before.any() and near(value - before, right):
        return "a gradient that was not cleared: that of the step before is in it"
    return _phrase_for_value(value, right, n, near)


def _phrase_for_shape(values: Sequence[Tensor], right: Tensor, near: Near) -> str:
    """Return the phrase for ``values`` whose shape differs from that of ``right``."""
    whole, value = join_parts(values, right.shape), values[0]
    if whole is not None and not near(whole, right):
        return _phrase_for_value(whole, right, len(values), near)
    if whole is not None or _is_slice(value, right, near):
        return "a shard taken for the whole"
    return f"another shape: {tuple(value.shape)} for {tuple(right.shape)}"


def _is_slice(value: Tensor, right: Tensor, near: Near) -> bool:
    """Return whether ``value`` is a slice of ``right``, such as a shard, along one dim."""
    sizes = list(zip(value.shape, right.shape, strict=False))
    return value.ndim == right.ndim and any(
        near(value, right.narrow(dim, start, size))
        for dim, (size, whole) in enumerate(sizes)
        for start in range(whole - size + 1)
        if size < whole
    )


def _phrase_for_ranks(values: Sequence[Tensor], right: Tensor, near: Near) -> str:
    """Return the phrase for values that should be equal on all ranks and are not."""
    n, total = len(values), torch.stack(list(values)).sum(0)
    if near(total, right):
        return "an addend taken for the whole: the ranks' values sum to it"
    if near(total / n, right):
        return "each rank's own part taken for the whole: the mean over ranks is right"
    right_ranks = [k for k, v in enumerate(values) if near(v, right)]
    if right_ranks:
        return f"ranks differ: right on {_ranks_text(right_ranks)} only"
    if _is_masked(values, right, near):
        return "other random numbers: each rank drops other elements"
    return "ranks differ, and none is right: other data or random numbers on each"


def _phrase_for_value(value: Tensor, right: Tensor, n: int, near: Near) -> str:
    """Return the phrase for a wrong ``value`` of the correct shape, the same on all ``n`` ranks."""
    scale = right.flatten().double()
    square = float(scale @ scale)
    times = float(value.flatten().double() @ scale) / square if square else 0.0
    if times and near(value / times, right):
        return _phrase_for_factor(times, n)
    slices = _right_slices(value, right, near)
    if slices:
        return f"{slices} are right: a mask, batch or shard of one rank, or some left out"
    if _is_masked([value], right, near):
        return "other random numbers: other elements are dropped"
    if _is_permuted(value, right, near):
        return "the right rows in another order"
    return "other values"


def _phrase_for_factor(times: float, n: int) -> str:
    """Return the phrase for a value that is ``times`` the correct one, on ``n`` ranks."""
    if abs(times + 1) < 1e-3:
        return "the wrong sign"
    if abs(times - n) < 1e-2:
        return f"{n} times the value: doubled, a whole taken for an addend or summed once too often"
    if abs(times - 1 / n) < 1e-3:
        return f"1/{n} of the value: a wrong divisor, or an addend that was not summed"
    return f"{times:.4g} times the value: a wrong divisor or weight"


def _right_slices(value: Tensor, right: Tensor, near: Near) -> str:
    """Return how many slices of ``value`` are correct, such as ``3 of 8 rows``; "" if none.

    It tries the dims from the first on, and counts along the first dim that has correct slices.
    """
    for dim, size in enumerate(right.shape):
        if not 1 < size <= MAX_SLICES:
            continue
        pairs = zip(value.unbind(dim), right.unbind(dim), strict=True)
        count = sum(near(a, b) and bool(b.any()) for a, b in pairs)
        if count:
            return f"{count} of {size} " + (f"slices along dim {dim}" if dim else "rows")
    return ""


def _is_permuted(value: Tensor, right: Tensor, near: Near) -> bool:
    """Return whether ``value`` has the rows of ``right`` in another order."""
    if right.ndim < 1 or not 1 < len(right) <= MAX_SLICES:
        return False
    orders = [
        x.flatten(1).double().sum(1).argsort() if x.ndim > 1 else x.argsort()
        for x in (value, right)
    ]
    return near(value[orders[0]], right[orders[1]])


def _is_masked(values: Sequence[Tensor], right: Tensor, near: Near) -> bool:
    """Return whether ``values`` differ from ``right`` only in which elements are zero.

    Another dropout mask has this effect. Each value must equal ``right`` where both are nonzero.
    """
    for value in values:
        both_nonzero = (value != 0) & (right != 0)
        zeros = (value == 0) ^ (right == 0)
        if not (both_nonzero.any() and zeros.any()):
            return False
        if not near(value[both_nonzero], right[both_nonzero]):
            return False
    return True


def _ranks_text(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
