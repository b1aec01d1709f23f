"""The layout in which optimizers step a parameter, and so the one of their state for it.

It is the parameter's own, or one that a plan has said (ZeRO-1 and ZeRO-2 step slices of what lies
whole).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...dispatch.plans.shards import is_global, rebox
from ...spec import NdSbp, TensorSpec, as_nd_sbp
from ..making.create import distribute

_LAYOUT = "_step_sbp"  # kept as text, which torch.load(weights_only=True) reads


def lay_step(param: Any, sbp: NdSbp) -> None:
    """Let optimizers step ``param`` as ``sbp``."""
    param.__dict__[_LAYOUT] = str(sbp)


def forget_step_layout(param: Any) -> None:
    """Take back ``lay_step``: ``param`` steps as it lies."""
    param.__dict__.pop(_LAYOUT, None)


def has_step_layout(param: Any) -> bool:
    """Whether ``lay_step`` was called for ``param``."""
    return _LAYOUT in param.__dict__


def step_spec(param: Any) -> TensorSpec:
    """The spec in which optimizers step ``param``."""
    text = param.__dict__.get(_LAYOUT)
    return param._spec if text is None else param._spec.with_sbp(_parsed(text))


@lru_cache
def _parsed(text: str) -> NdSbp:
    return as_nd_sbp(text)


@torch.no_grad()
def loaded_state(param: Any, value: Any) -> Any:
    """``value``, which an optimizer loads for ``param``, as it would have made it itself: a tensor
    of the parameter's shape, whole and plain or in another layout, lies as the step does. A
    collective if ``value`` has to move."""
    if not is_global(param) or value.ndim == 0 or value.shape != param.shape:
        return value
    laid = step_spec(param).with_dtype(value.dtype)
    if not is_global(value):
        return distribute(value.detach(), laid.placement, laid.sbp)
    if value._spec is laid or value._spec.placement != laid.placement:
        return value
    return rebox(value, laid, "optimizer state")
