"""Tensor methods that dispatch handles by a function of this module instead of a plan.

They read values, change dtype or device, or treat a tensor as a window onto memory. Queries are in
``inspection/answers.py``. ``x.size()`` finds the method of ``GlobalTensor`` itself;
``torch.Tensor.size(x)`` and ``torch.numel(x)`` come to the hook, which calls the handlers of this
module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.hook import torch_function
from ..dispatch.plans.plan import handlers
from ..dispatch.plans.shards import compare_and_adopt
from ..movement.world import device_of
from .global_tensor import GlobalTensor
from .inspection import (
    answers,  # noqa: F401  (registers its handlers)
    elsewhere,  # noqa: F401  (adds its attributes)
)
from .storage import memory


def _to(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
    """Implement ``Tensor.to`` where ``self`` or an argument is a global tensor.

    A change of dtype is an op. Of a device only the type counts, since the placement determines the
    device. ``plain.to(global_tensor)`` makes of the plain tensor a replicated (B) tensor on the
    other tensor's placement.
    """
    if self.__class__ is not GlobalTensor:
        args, kwargs, other = _without_tensor_argument(args, kwargs)
        return compare_and_adopt(self, other.placement, "to").to(other.dtype, *args, **kwargs)
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        # Fast path: models do this in every norm, mostly without a change.
        dtype = args[0]
        return self if dtype is self._spec.dtype else _copy_to(self, dtype)
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    # `_parse_to`, torch's own parser of these arguments, accepts no `copy`, so take it out first.
    copy = kwargs.pop("copy", False)
    if len(args) > 2 and isinstance(args[-1], bool) and isinstance(args[-2], bool):
        args, copy = args[:-1], args[-1]  # (..., non_blocking, copy)
    if "tensor" in kwargs:
        other = kwargs.pop("tensor")
        kwargs.update(device=other.device, dtype=other.dtype)
    device, dtype, _, memory_format = torch._C._nn._parse_to(  # pyright: ignore[reportAttributeAccessIssue]
        *args, **kwargs
    )
    _check_device_type(self, device)
    if (dtype is None or dtype == self.dtype) and not copy:
        return (
            self
            if memory_format in (None, torch.preserve_format)
            else self.contiguous(memory_format=memory_format)
        )
    return _copy_to(self, dtype or self.dtype)


def _without_tensor_argument(args: tuple, kwargs: dict) -> tuple[tuple, dict, Any]:
    """Return (args, kwargs, tensor) of ``plain.to(tensor, ...)``, with the tensor taken out."""
    if args:
        return args[1:], kwargs, args[0]
    kwargs = dict(kwargs)
    return args, kwargs, kwargs.pop("tensor")


_TO_COPY = torch.ops.aten._to_copy.default


def _copy_to(x: GlobalTensor, dtype: torch.dtype) -> Any:
    """Return a copy of ``x`` with the dtype ``dtype``."""
    # Calls the hook directly: going through torch.ops first would take longer than the op itself.
    return torch_function(_TO_COPY, (GlobalTensor,), (x,), {"dtype": dtype})


def _check_device_type(x: GlobalTensor, device: torch.device | str | int | None) -> None:
    """Raise if ``device`` is of another type than that of the placement of ``x``."""
    kind = None if device is None else torch.device(device).type
    if kind is not None and kind not in (x.placement.type, device_of(x.placement).type):
        raise RuntimeError(
            f'to: x is {x._spec}, and device "{device}" is of another type than its placement. '
            f'Move it with x.to_global(placement=placement("{kind}", ranks)).'
        )


def _device_method(kind: str) -> Callable[..., Any]:
    """Return the method ``cpu``, ``cuda``, ...: it returns the tensor, or raises.

    It raises if the tensor's placement is of another device type than ``kind``.
    """

    def move(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
        _check_device_type(self, kind)
        return self

    return move


def _type(self: GlobalTensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Implement ``Tensor.type``: the name of the tensor type, or a conversion to another dtype."""
    if dtype is None:
        return torch.empty(0, dtype=self.dtype, device=self.device).type()
    return self.to(torch.empty(0).type(dtype).dtype if isinstance(dtype, str) else dtype)


handlers.update(
    {
        "to": _to,
        "cpu": _device_method("cpu"),
        "cuda": _device_method("cuda"),
        "ipu": _device_method("ipu"),
        "mtia": _device_method("mtia"),
        "xpu": _device_method("xpu"),
        "type": _type,
        "numpy": GlobalTensor.numpy,
        "item": GlobalTensor.item,
        "_local_scalar_dense": GlobalTensor.item,
        "tolist": GlobalTensor.tolist,
        "numel": GlobalTensor.numel,
        "is_floating_point": GlobalTensor.is_floating_point,
        "is_complex": GlobalTensor.is_complex,
        "type_as": GlobalTensor.type_as,
        "requires_grad_": GlobalTensor.requires_grad_,
        "retain_grad": GlobalTensor.retain_grad,
        "size": GlobalTensor.size,
        "dim": GlobalTensor.dim,
        "ndimension": GlobalTensor.dim,
        "nelement": GlobalTensor.numel,
        "element_size": GlobalTensor.element_size,
        "stride": GlobalTensor.stride,
        "as_strided": memory.as_strided,
        "new": memory.new,
        "resize_": memory.resize_,
        "resize_as_": memory.resize_as_,
    }
)
