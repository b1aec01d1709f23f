"""Ops that are answered without a plan: questions about the tensor, reading values, changes of
dtype and device.

``x.size()`` finds the method of GlobalTensor; ``torch.Tensor.size(x)`` and ``torch.numel(x)`` come
to the hook, and from there to these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .global_tensor import GlobalTensor
from .plan import handlers
from .shards import plain


def _to(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to``: dtype changes are an op; a device names its type only, since the placement
    says which one."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    if len(args) > 2 and isinstance(args[-1], bool) and isinstance(args[-2], bool):
        args, copy = args[:-1], args[-1]  # (..., non_blocking, copy)
    if "other" in kwargs:
        other = kwargs.pop("other")
        kwargs.update(device=other.device, dtype=other.dtype)
    device, dtype, _, memory_format = torch._C._nn._parse_to(  # pyright: ignore[reportAttributeAccessIssue]
        *args, **kwargs
    )
    _same_device(self, device)
    if (dtype is None or dtype == self.dtype) and not copy:
        return (
            self
            if memory_format in (None, torch.preserve_format)
            else self.contiguous(memory_format=memory_format)
        )
    return torch.ops.aten._to_copy.default(self, dtype=dtype or self.dtype)


def _same_device(x: GlobalTensor, device: torch.device | str | int | None) -> None:
    kind = None if device is None else torch.device(device).type
    if kind is not None and kind != x.placement.type:
        raise RuntimeError(
            f'to: x is {x._spec}, and device "{device}" is of another type than its placement. '
            f'Move it with x.to_global(placement=placement("{kind}", ranks)).'
        )


def _on(kind: str) -> Callable[..., Any]:
    def move(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
        _same_device(self, kind)
        return self

    return move


def _type(self: GlobalTensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        return plain(self).type()
    return self.to(torch.empty(0).type(dtype).dtype if isinstance(dtype, str) else dtype)


handlers.update(
    {
        "to": _to,
        "cpu": _on("cpu"),
        "cuda": _on("cuda"),
        "type": _type,
        "numpy": GlobalTensor.numpy,
        "item": GlobalTensor.item,
        "tolist": GlobalTensor.tolist,
        "numel": GlobalTensor.numel,
        "is_floating_point": GlobalTensor.is_floating_point,
        "is_complex": GlobalTensor.is_complex,
        "type_as": GlobalTensor.type_as,
        "requires_grad": GlobalTensor.requires_grad_,
        "retain_grad": GlobalTensor.retain_grad,
        "size": GlobalTensor.size,
        "dim": GlobalTensor.dim,
        "stride": GlobalTensor.stride,
    }
)
