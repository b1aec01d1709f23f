"""Strides of the logical tensor as it would be on one device, in the memory order of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...dispatch.plans.shards import HookOff

_Base: Any = torch.Tensor


def logical_strides(x: Any) -> tuple[int, ...]:
    """Return the strides of the logical tensor as it would be on one device.

    They are the strides of the shard, rescaled so that split dims have the logical size:

    ```
    [4, 6] S(1) on two ranks, shards [4, 3] with strides (3, 1)  ->  (6, 1)
    ```

    If all dims of a shard have one element, their order is unknown: they count as contiguous.
    """
    with HookOff():
        local_strides, local_shape = _Base.stride(x), _Base.size(x)
    sizes: Sequence[int] = x._spec.shape
    if local_shape == sizes:
        return local_strides
    strides = list(local_strides)
    for d, (n, size) in enumerate(zip(local_shape, sizes, strict=True)):
        for outer in range(len(sizes)):
            if (
                n != size
                and local_strides[d] != 0
                and _is_outside(outer, d, local_strides, local_shape)
            ):
                # An empty shard does not show gaps between items, so none are assumed.
                strides[outer] = strides[outer] * size // n if n else strides[outer] * size
    return tuple(strides)


def _is_outside(a: int, b: int, strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether dim ``a`` is outer to ``b`` in memory: a step of ``a`` spans all of ``b``."""
    outside = strides[a] >= strides[b] * max(sizes[b], 1)
    inside = strides[b] >= strides[a] * max(sizes[a], 1)
    return a != b and outside and (not inside or a < b)
