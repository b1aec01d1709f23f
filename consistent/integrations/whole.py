"""Helpers that replace global tensors by whole plain ones, for libraries that need those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current

from ..data.nested import mapped
from ..dispatch.plans.shards import is_global


def whole(x: Any) -> Any:
    """Return ``x`` with each global tensor replaced by the whole plain tensor. A collective.

    ``x`` may be any nesting of containers. All other values are returned as they are.
    """
    known: dict[int, Tensor] = {}

    def made(_: Any, value: Tensor) -> Tensor:
        if not is_global(value):
            return value
        if id(value) not in known:  # a tied weight stays one tensor
            known[id(value)] = value.full()  # type: ignore[attr-defined]
        return known[id(value)]

    return mapped(made, x)


def whole_on_first(x: Any) -> Any:
    """Return ``x`` with whole plain tensors in place of global ones on rank 0, None on other ranks.

    A collective. It takes less memory than ``whole``: other ranks hold one whole tensor at a time.
    """
    first = current().rank == 0
    found = mapped(
        lambda _, v: _kept(v.full(), first) if is_global(v) else v,  # type: ignore[attr-defined]
        x,
    )
    return found if first else None


def _kept(value: Tensor, keep: bool) -> Tensor:
    return value if keep else torch.empty(0)
