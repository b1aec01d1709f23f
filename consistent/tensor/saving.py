"""Copies of global tensors: deepcopy, pickle and ``torch.save``.

A saved global tensor is this rank's shard with its layout. It loads on the rank that stands where
the saving one stood; ``x.full()`` is what to save for another placement.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..boxing.run import here
from ..spec import Placement, TensorSpec
from . import gradients
from .shards import attach, device_of, plain

# Attributes that describe one object and are not copied along.
_OWN = ("_spec", "_watched", "_moved_view")


def deep_copy(x: Any, memo: dict) -> Any:
    """``copy.deepcopy`` of a leaf."""
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            "deepcopy: this tensor is the result of ops that autograd recorded, and only leaves "
            "are copied deeply. "
            "Use x.detach().clone()."
        )
    new = x.detach().clone()
    memo[id(x)] = new
    _carry(x, new)
    if x.grad is not None:
        gradients.set_raw_grad(new, copy.deepcopy(x.grad, memo))
    return new


def reduce(x: Any) -> tuple:
    """What pickle and ``torch.save`` write: this rank's shard and how it lies."""
    # Only lists, numbers and texts beside the shard, so that torch.load(weights_only=True) takes
    # it.
    spec = x._spec
    at = here(spec.placement)
    local = None if at is None else plain(x.detach()).cpu().contiguous()
    grid = (spec.placement.type, spec.placement.ranks.tolist(), spec.placement.axes)
    extra = {k: v for k, v in x.__dict__.items() if k not in _OWN}
    layout = (grid, str(spec.sbp), tuple(spec.shape), spec.dtype)
    return (_rebuild, (local, layout, at, x.requires_grad, extra))


def _carry(old: Any, new: Any) -> None:
    for key, value in old.__dict__.items():
        if key not in _OWN:
            new.__dict__[key] = value
    if old.requires_grad:
        new.requires_grad_()


def _rebuild(local: Any, layout: tuple, saved_at: Any, requires_grad: bool, extra: dict) -> Any:
    grid, sbp, shape, dtype = layout
    spec = TensorSpec.of(Placement(*grid), sbp, shape, dtype)
    at = here(spec.placement)
    if at != saved_at:
        raise RuntimeError(
            f"load: this is the shard that the rank at {saved_at} of {spec.placement} saved, and "
            f"this rank is at {at}. "
            "Load on every rank the file that it saved itself, or save x.full() to move a tensor."
        )
    if at is None:
        local = torch.empty(spec.local_shape(None), dtype=spec.dtype, device="meta")
    x = attach(local.to(device_of(spec.placement)) if at is not None else local, spec)
    x.__dict__.update(extra)
    return x.requires_grad_() if requires_grad else x


# torch.load(weights_only=True) calls nothing that it was not told of.
torch.serialization.add_safe_globals([_rebuild])
