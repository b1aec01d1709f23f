"""Ops for which torch records another autograd graph if the shard is empty.

For an empty input torch implements them by other ops. Their gradients would reach the leaves in
another order than on ranks with rows, or not at all. Ranks sum large gradients in the order in
which backward computes them, so gradients of two different parameters would be added to each other,
or a rank would miss a collective. On an empty shard these ops therefore run on one row of zeros,
which is dropped again: autograd then records the same graph as on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..plans.shards import plain


def wrap_for_empty_shards(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, wrapped if needed to record the same autograd graph on an empty shard.

    ``name`` is the op that it computes. Only batch norm and ``scaled_dot_product_attention`` are
    wrapped.
    """
    wrapper = {"batch_norm": _batch_norm, "scaled_dot_product_attention": _attention}.get(name)
    return function if wrapper is None else partial(wrapper, function)


def _batch_norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run batch norm on a row of zeros if the shard is empty, in evaluation mode with gradients.

    Torch would scale an empty input by its first weight instead (``_batch_norm_impl_index``). The
    row is dropped from the result.
    """
    if not args:
        return _batch_norm(function, kwargs.pop("input"), **kwargs)
    x, rest = args[0], args[1:]
    training = rest[4] if len(rest) > 4 else kwargs.get("training")
    # torch.Tensor's own methods read the shard, where x.numel() would be that of the logical
    # tensor.
    has_rows = torch.Tensor.numel(x) or torch.Tensor.dim(x) < 2
    if training or has_rows or not torch.is_grad_enabled():
        return function(x, *rest, **kwargs)
    x = plain(x)
    sizes = [size if dim == 1 else max(size, 1) for dim, size in enumerate(x.shape)]
    out = function(x.new_zeros(sizes), *rest, **kwargs)
    for dim, size in enumerate(x.shape):
        out = out.narrow(dim, 0, size)
    return out + x  # x is empty here; the sum puts it into the graph


def _attention(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run attention on a row of zeros if the batch is empty and the mask requires grad.

    For an empty batch torch returns zeros that do not depend on the mask, so the mask would get no
    gradient on this rank. The row is dropped from the result.
    """
    arguments = {**dict(zip(("query", "key", "value", "attn_mask"), args)), **kwargs}
    mask, sizes = arguments.get("attn_mask"), torch.Tensor.size(arguments["query"])[:-2]
    mask_needs_grad = (
        isinstance(mask, torch.Tensor) and mask.requires_grad and torch.is_grad_enabled()
    )
    if all(sizes) or not mask_needs_grad:
        return function(*args, **kwargs)
    rest = [_pad_empty_dims(x) if isinstance(x, torch.Tensor) else x for x in args]
    named = {n: _pad_empty_dims(x) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    out = function(*rest, **named)
    for dim, size in enumerate(sizes):
        out = out.narrow(dim, 0, size)
    return out


def _pad_empty_dims(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` padded with zeros to one item in each batch or head dim that is empty."""
    x = plain(x)
    for dim in range(x.dim() - 2):
        if not x.shape[dim]:
            sizes = [1 if d == dim else size for d, size in enumerate(x.shape)]
            x = torch.cat([x, x.new_zeros(sizes)], dim)
    return x
