"""Access to the gradient that a leaf holds, and the spec of that gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...spec import B, NdSbp, TensorSpec, as_nd_sbp
from .. import _C

_LAYOUT_KEY = "_grad_sbp"  # stored as a string, since torch.load(weights_only=True) loads strings

# (leaf) -> its gradient, typed as a global tensor; None if there is none.
raw_grad = _C.gradient


def set_raw_grad(leaf: Any, grad: Any) -> None:
    """Store ``grad`` as the gradient of ``leaf``, without boxing or checks.

    It replaces the gradient that ``leaf`` has, and drops gradients of ``leaf`` that have been
    computed but not yet been summed over ranks.
    """
    _C.drop_waiting(leaf)
    _C.set_gradient(leaf, grad)


def summed_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Return the axes over which the gradient of a leaf with ``spec`` is summed.

    These are its B axes of more than one rank: each rank there computes an addend of the gradient.
    """
    shape = spec.placement.shape
    return tuple(axis for axis, entry in enumerate(spec.sbp) if entry is B and shape[axis] > 1)


def set_gradient_layout(leaf: Any, sbp: NdSbp) -> None:
    """Set the layout that the gradient of ``leaf`` has after each backward pass to ``sbp``.

    Without this it has the leaf's own layout. An optimizer whose state is split uses it to get
    split gradients of a B parameter.
    """
    leaf.__dict__[_LAYOUT_KEY] = str(sbp)
    _C.watch_if_leaf(leaf)


def forget_gradient_layout(leaf: Any) -> None:
    """Undo ``set_gradient_layout``: the gradient of ``leaf`` has the leaf's own layout again.

    The caller must call ``leaves.watch_leaf`` for ``leaf`` again.
    """
    leaf.__dict__.pop(_LAYOUT_KEY, None)


def settled_spec(leaf: Any) -> TensorSpec:
    """Return the spec that the gradient of ``leaf`` has after a backward pass, all sums done.

    It is the leaf's own spec with B in place of P, or has the layout that
    ``set_gradient_layout`` has set.
    """
    text = leaf.__dict__.get(_LAYOUT_KEY)
    return leaf._spec.settled if text is None else leaf._spec.with_sbp(_parse_sbp(text))


@lru_cache
def _parse_sbp(text: str) -> NdSbp:
    return as_nd_sbp(text)


def gradient_spec(x: Any, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of the gradient that autograd computes for ``x``, before any sum over ranks.

    Its SBP is the dual of that of ``x`` (P where ``x`` is B), its dtype is ``dtype``.
    """
    spec: TensorSpec = x._spec
    return spec.dual.with_dtype(dtype)
