"""The layout in which optimizers update a parameter, which is also that of their state for it.

It is the parameter's own layout, or one that a parallelization plan has set: ZeRO-1 and ZeRO-2
update a shard of each parameter that is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ...dispatch.plans.shards import is_global, rebox
from ...spec import B, NdSbp, Placement, TensorSpec, as_nd_sbp
from ..making.create import distribute

_LAYOUT = "_step_sbp"  # stored as a string, since torch.load(weights_only=True) loads strings


def set_step_layout(param: Any, sbp: NdSbp) -> None:
    """Make optimizers update ``param``, and keep their state for it, in the layout ``sbp``.

    Parallelization plans such as ZeRO-1 call it: the parameter is whole on each rank, and the rank
    updates a shard of it.
    """
    param.__dict__[_LAYOUT] = str(sbp)


def forget_step_layout(param: Any) -> None:
    """Undo ``set_step_layout``, so that optimizers update ``param`` in its own layout."""
    param.__dict__.pop(_LAYOUT, None)


def has_step_layout(param: Any) -> bool:
    """Return whether ``set_step_layout`` was called for ``param``."""
    return _LAYOUT in param.__dict__


def step_spec(param: Any) -> TensorSpec:
    """Return the spec in which optimizers update ``param`` and keep their state for it.

    It is that of the parameter unless ``set_step_layout`` was called.
    """
    text = param.__dict__.get(_LAYOUT)
    return param._spec if text is None else param._spec.with_sbp(_parse_sbp(text))


@lru_cache
def _parse_sbp(text: str) -> NdSbp:
    return as_nd_sbp(text)


class OwnedState(dict):
    """Optimizer state of a parameter that a single rank updates, all of it.

    The state holds plain tensors on that rank, and is empty on the other ranks.

    Args:
        values: the state.
        owner: the placement of that one rank.
    """

    def __init__(self, values: dict[str, Any], owner: Placement) -> None:
        super().__init__(values)
        self.owner = owner

    def __reduce__(self) -> tuple:
        return OwnedState, (dict(self), self.owner)


def owned_spec(owner: Placement, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """Return the spec of a tensor that the one rank of the placement ``owner`` holds."""
    return TensorSpec.of(owner, (B,), shape, dtype)


@torch.no_grad()
def loaded_state(param: Any, value: Any) -> Any:
    """Return a loaded tensor of optimizer state in the layout in which ``param`` is updated.

    ``Optimizer.load_state_dict`` calls it for each tensor. It is a collective if ``value`` has to
    move.

    * A ``value`` of the parameter's shape, whole and plain or in another layout, is boxed to the
      layout of the update.
    * A tensor of another shape, from the one rank that kept the state, is brought to all ranks of
      the parameter.
    """
    if not is_global(param) or value.ndim == 0:
        return value
    target = step_spec(param).with_dtype(value.dtype)
    if value.shape != param.shape:
        if not is_global(value) or value._spec.placement == target.placement:
            return value
        target = TensorSpec.of(
            target.placement, (B,) * target.placement.ndim, value.shape, value.dtype
        )
    if not is_global(value):
        return distribute(value.detach(), target.placement, target.sbp)
    return value if value._spec is target else rebox(value, target, "optimizer state")
