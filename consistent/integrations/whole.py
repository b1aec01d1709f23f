"""Helpers that replace global tensors by whole plain ones, for libraries that need those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current

from ..data.nested import map_leaves
from ..dispatch.plans.shards import is_global


def whole(x: Any) -> Any:
    """Return ``x`` with each global tensor replaced by the whole plain tensor. A collective.

    ``x`` may be any nesting of containers. All other values are returned as they are.
    """
    wholes: dict[int, Tensor] = {}

    def whole_value(_: Any, value: Tensor) -> Tensor:
        if not is_global(value):
            return value
        if id(value) not in wholes:  # a tied weight stays one tensor
            wholes[id(value)] = value.full()  # type: ignore[attr-defined]
        return wholes[id(value)]

    return map_leaves(whole_value, x)


def gather_on_first(x: Any) -> Any:
    """Return ``x`` with whole plain tensors in place of global ones on rank 0, None on other ranks.

    A collective. It takes less memory than ``whole``: other ranks hold one whole tensor at a
    time.
    """
    is_first = current().rank == 0
    result = map_leaves(
        lambda _, v: _keep_or_empty(v.full(), is_first) if is_global(v) else v,  # type: ignore[attr-defined]
        x,
    )
    return result if is_first else None


def _keep_or_empty(value: Tensor, keep: bool) -> Tensor:
    return value if keep else torch.empty(0)
