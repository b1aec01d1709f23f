"""Ops that torch answers by other ops where the shard is empty.

Their gradients would reach the leaves in another order than on ranks with rows. Ranks sum large
gradients as they come, so two parameters of one shape would be added to each other. On an empty
shard these ops run on one row of zeros, which is dropped again: autograd then records the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..plans.shards import plain


def same_graph(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, the op called ``name`` on shards, so that it records the same on each rank."""
    return partial(_batch_norm, function) if name == "batch_norm" else function


def _batch_norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch scales an empty input by its first weight (``_batch_norm_impl_index``)."""
    if not args:
        return _batch_norm(function, kwargs.pop("input"), **kwargs)
    x, rest = args[0], args[1:]
    training = rest[4] if len(rest) > 4 else kwargs.get("training")
    has_rows = torch.Tensor.numel(x) or torch.Tensor.dim(x) < 2
    if training or has_rows or not torch.is_grad_enabled():
        return function(x, *rest, **kwargs)
    x = plain(x)
    sizes = [size if dim == 1 else max(size, 1) for dim, size in enumerate(x.shape)]
    out = function(x.new_zeros(sizes), *rest, **kwargs)
    for dim, size in enumerate(x.shape):
        out = out.narrow(dim, 0, size)
    return out + x
