"""The gradient that a leaf holds: as torch stores it, and its spec."""

from __future__ import annotations

from typing import Any

import torch

from ...spec import B, TensorSpec
from .. import _C

# (leaf) -> its gradient, typed as a global tensor; None if there is none.
raw_grad = _C.gradient


def set_raw_grad(leaf: Any, grad: Any) -> None:
    """Store a gradient as it is; it replaces the one that the leaf has and all addends that
    wait."""
    _C.drop_waiting(leaf)
    _C.set_gradient(leaf, grad)


def summed_axes(spec: TensorSpec) -> tuple[int, ...]:
    """The axes over which the gradient of a leaf with ``spec`` has to be summed."""
    shape = spec.placement.shape
    return tuple(axis for axis, entry in enumerate(spec.sbp) if entry is B and shape[axis] > 1)


def gradient_spec(x: Any, dtype: torch.dtype) -> TensorSpec:
    """Spec of the raw gradient that autograd computes for ``x``."""
    spec: TensorSpec = x._spec
    return spec.dual.with_dtype(dtype)
