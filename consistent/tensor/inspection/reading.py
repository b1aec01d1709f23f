"""Reading of values: the logical value as Python, numpy or plain torch objects, on every rank.

These are the only queries that communicate: every rank of the world must make them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.plans.shards import plain
from ...movement import check_mode
from ...movement.run import run as run_boxing
from ...movement.world import whole_on_world
from ...spec.tracer import callbacks

_VALUE_OF = callbacks("value_of")


def full(self: Any) -> torch.Tensor:
    """Return the whole logical value as a plain tensor on every rank of the world.

    It is a collective: every rank of the world must call it. The result is detached from autograd.
    """
    # The tracer that came last answers first.
    for value_of in reversed(_VALUE_OF):
        if (value := value_of(self)) is not None:
            return value
    check_mode.set_current_op("full")
    with torch.no_grad():
        return run_boxing(plain(self.detach()), self._spec, whole_on_world(self._spec))


def item(self: Any) -> Any:
    """Return the only element as a Python number, on every rank.

    It is a collective: every rank of the world must call it.

    Raises:
        RuntimeError: the tensor does not have exactly one element.
    """
    if self.numel() != 1:
        raise RuntimeError(
            f"item: x is {self._spec} with {self.numel()} elements, and only a tensor with "
            "one element is a Python number. Index or reduce it first, or use x.tolist()."
        )
    return full(self).item()


def tolist(self: Any) -> Any:
    """Return the logical value as nested lists, on every rank.

    It is a collective: every rank of the world must call it.
    """
    return full(self).tolist()


def numpy(self: Any, *, force: bool = False) -> Any:
    """Return the logical value as a numpy array, on every rank.

    It is a collective: every rank of the world must call it. If this rank holds the whole value,
    the array shares the tensor's memory, as in torch. Otherwise it is a copy, which is read-only,
    because writes into it would not reach the tensor.

    Raises:
        RuntimeError: the tensor requires grad, and ``force`` is not set.
    """
    if self.requires_grad and not force:
        raise RuntimeError(
            f"numpy: x is {self._spec} and requires grad, and numpy records no gradients. "
            "Use x.detach().numpy()."
        )
    value = full(self)
    values = value.numpy(force=force)
    if value.untyped_storage()._cdata != plain(self).untyped_storage()._cdata:
        values.setflags(write=False)
    return values


def array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """Implement ``numpy.asarray(x)`` and ``numpy.array(x)``; a collective, as ``numpy`` is.

    ``numpy.array`` passes ``copy=True``.
    """
    value = numpy(self)
    if dtype is not None:
        value = value.astype(dtype, copy=False)
    # An array that owns its data is a copy already, made by `astype`.
    return value.copy() if copy and not value.flags.owndata else value


def truth(self: Any) -> bool:
    """Implement ``bool(x)``, as in ``if x:``; a collective, as ``item`` is."""
    return bool(item(self))


def as_int(self: Any) -> int:
    """Implement ``int(x)``; a collective, as ``item`` is."""
    return int(item(self))


def as_float(self: Any) -> float:
    """Implement ``float(x)``; a collective, as ``item`` is."""
    return float(item(self))


def as_complex(self: Any) -> complex:
    """Implement ``complex(x)``; a collective, as ``item`` is."""
    return complex(item(self))


def index(self: Any) -> int:
    """Implement ``sequence[x]``, where ``x`` is an index; a collective, as ``full`` is."""
    return full(self).__index__()


def contains(self: Any, element: Any) -> bool:
    """Implement ``element in x``, by values; a collective, as ``item`` is."""
    return bool((element == self).any().item())
