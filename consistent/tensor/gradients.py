"""The gradient that a leaf holds: as torch has it, and where it lies."""

from __future__ import annotations

from typing import Any

import torch

from ..spec import B, TensorSpec, dual_nd
from . import _C
from .shards import HookOff, attach

# (leaf) -> the gradient as torch holds it, typed as a global tensor; None if there is none.
raw_grad = _C.gradient


def type_gradient(leaf: Any, grad: torch.Tensor) -> Any:
    """``grad``, which autograd has just made of a leaf: a local tensor in the dual SBP."""
    if grad._is_zerotensor():  # one that autograd knows to be zero has no memory
        grad = grad.clone()
        set_raw_grad(leaf, grad)
    return attach(grad, leaf._spec.dual.with_dtype(grad.dtype))


def set_raw_grad(leaf: Any, grad: Any) -> None:
    """Store a gradient as torch holds it."""
    with HookOff():
        torch.Tensor.grad.__set__(leaf, grad)  # type: ignore[attr-defined]


def settled_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """Where the gradient of a leaf with ``spec`` ends: as the leaf lies, and B where the leaf is
    P (as it comes out)."""
    if any(entry.is_partial for entry in spec.sbp):
        spec = spec.with_sbp(tuple(B if entry.is_partial else entry for entry in spec.sbp))
    return spec.with_dtype(dtype)


def gradient_spec(x: Any, dtype: torch.dtype) -> TensorSpec:
    """Spec of the raw gradient that autograd computes for ``x``."""
    spec: TensorSpec = x._spec
    return spec.with_sbp(dual_nd(spec.sbp)).with_dtype(dtype)
