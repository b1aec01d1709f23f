"""Changes for functions that read values of a tensor without calling ``__torch_function__``.

They read a number, as ``torch.full((2,), x)`` does, or copy data, as ``torch.tensor(x)`` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..dispatch import _C
from ..dispatch.plans.shards import is_global
from ..dispatch.running.outside_ranks import map_values
from ..tensor.global_tensor import GlobalTensor
from .redirect import redirect


def install() -> None:
    """Make torch's functions that read numbers out of a tensor read the logical value.

    The read is a collective, like ``x.item()``: ``torch.full((2,), x)``, ``torch.add(a, b,
    alpha=x)``. ``torch.tensor([x, y])`` reads whole values, and ``torch.tensor(x)``, a copy of a
    global tensor, is global.
    """
    _C.read_numbers_by(lambda x: x.item())
    redirect(torch.tensor, _tensor)
    redirect(torch.as_tensor, _as_tensor)
    redirect(torch.asarray, _asarray)
    redirect(torch._C.TensorBase.new_tensor, _new_tensor)


def _with_whole_values(data: Any) -> Any:
    """Replace each global tensor in the nested lists ``data`` by a plain tensor of its whole value.

    ``torch.tensor`` reads such lists element by element, which a global tensor does not support.
    """
    return map_values(data, GlobalTensor, lambda x: x.full())


def _tensor(original: Callable[..., Any], data: Any, **options: Any) -> Any:
    """Implement ``torch.tensor`` for data that is, or contains, a global tensor."""
    if not is_global(data):
        return original(_with_whole_values(data), **options)
    requires_grad = options.pop("requires_grad", False)
    options.pop("pin_memory", None)
    # torch gives this warning for plain tensors.
    warnings.warn(
        "To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() "
        "or sourceTensor.detach().clone().requires_grad_(True), rather than "
        "torch.tensor(sourceTensor).",
        stacklevel=2,
    )
    return _copy(data, **options).requires_grad_(requires_grad)


def _copy(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    return data.detach().to(device=device, dtype=dtype, copy=True)


def _as_tensor(original: Callable[..., Any], data: Any, *args: Any, **options: Any) -> Any:
    """Implement ``torch.as_tensor`` for data that is, or contains, a global tensor."""
    if not is_global(data):
        return original(_with_whole_values(data), *args, **options)
    dtype, device = (*args, None, None)[:2]
    return data.to(device=options.get("device", device), dtype=options.get("dtype", dtype))


def _asarray(original: Callable[..., Any], obj: Any, **options: Any) -> Any:
    """Implement ``torch.asarray`` for an object that is, or contains, a global tensor."""
    return (
        _asarray_of_global(obj, **options)
        if is_global(obj)
        else original(_with_whole_values(obj), **options)
    )


def _asarray_of_global(
    obj: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    copy: bool | None = None,
    requires_grad: bool = False,
) -> Any:
    same_dtype = dtype in (None, obj.dtype)
    if copy is False and not same_dtype:
        raise ValueError(f"can't alias tensor with dtype '{obj.dtype}' into dtype '{dtype}'.")
    result = obj.to(device=device, dtype=dtype, copy=bool(copy))
    if not requires_grad:
        return result.detach() if result.requires_grad else result
    return result if result.requires_grad else result.requires_grad_()


def _new_tensor(original: Callable[..., Any], self: Any, data: Any, **options: Any) -> Any:
    """Implement ``plain.new_tensor(data)`` for data that is, or contains, a global tensor."""
    if is_global(self):  # torch calls __torch_function__ itself
        return original(self, data, **options)
    if not is_global(data):
        return original(self, _with_whole_values(data), **options)
    requires_grad = options.pop("requires_grad", False)
    options.setdefault("dtype", self.dtype)
    options.pop("pin_memory", None)
    return _copy(data, **options).requires_grad_(requires_grad)
