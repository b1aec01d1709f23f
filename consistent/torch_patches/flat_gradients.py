"""A change for LBFGS, which concatenates all gradients into one vector.

The vector needs one layout. For parameters on several placements, or plain and global ones, it is a
plain tensor, equal on every rank of the world, like the norm of such gradients in clipping. Its
parts are added to parameters on any placement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.plans.shards import is_global, whole_on_all_ranks


def install() -> None:
    """Patch ``LBFGS._gather_flat_grad``, so that it accepts gradients on several placements."""
    original: Callable[[Any], Any] = torch.optim.LBFGS._gather_flat_grad

    @functools.wraps(original)
    def gather_flat_grad(self: Any) -> Any:
        placements = {p.placement if is_global(p) else None for p in self._params}
        if len(placements) == 1:
            return original(self)
        return torch.cat([whole_on_all_ranks(_flat_gradient(p)) for p in self._params])

    torch.optim.LBFGS._gather_flat_grad = gather_flat_grad  # type: ignore[method-assign]


def _flat_gradient(p: Any) -> Any:
    """Return the gradient of ``p`` as a vector of real numbers, zeros if it has none."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    grad = grad.to_dense() if grad.is_sparse else grad
    return (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1).detach()
