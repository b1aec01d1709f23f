"""Reading values: the logical value as Python, numpy or plain torch objects, on every rank.

These are the only questions to a tensor that communicate: every rank of the world asks them.
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
    """The whole logical value as a plain tensor on every rank of the world, without autograd. A
    collective."""
    for known in reversed(_VALUE_OF):
        if (value := known(self)) is not None:
            return value
    check_mode.calling("full")
    with torch.no_grad():
        return run_boxing(plain(self.detach()), self._spec, whole_on_world(self._spec))


def item(self: Any) -> Any:
    """The one logical element, on every rank."""
    if self.numel() != 1:
        raise RuntimeError(
            f"item: x is {self._spec} with {self.numel()} elements, and only a tensor with "
            "one element is a Python number. Index or reduce it first, or use x.tolist()."
        )
    return full(self).item()


def tolist(self: Any) -> Any:
    """The logical value as nested lists."""
    return full(self).tolist()


def numpy(self: Any, *, force: bool = False) -> Any:
    """The logical value as a numpy array, on every rank: the tensor's own memory where this rank
    holds all of it, as in torch, else a copy, which is read-only: what is written into it would
    not reach the tensor."""
    if self.requires_grad and not force:
        raise RuntimeError(
            f"numpy: x is {self._spec} and requires grad, and numpy records no gradients. "
            "Use x.detach().numpy()."
        )
    value = full(self)
    found = value.numpy(force=force)
    if value.untyped_storage()._cdata != plain(self).untyped_storage()._cdata:
        found.setflags(write=False)
    return found


def array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """``numpy.asarray(x)``, and ``numpy.array(x)``, which asks for a copy."""
    value = numpy(self)
    if dtype is not None:
        value = value.astype(dtype, copy=False)
    return value.copy() if copy and not value.flags.owndata else value


def truth(self: Any) -> bool:
    """``bool(x)``."""
    return bool(item(self))


def as_int(self: Any) -> int:
    """``int(x)``."""
    return int(item(self))


def as_float(self: Any) -> float:
    """``float(x)``."""
    return float(item(self))


def as_complex(self: Any) -> complex:
    """``complex(x)``."""
    return complex(item(self))


def index(self: Any) -> int:
    """``sequence[x]``."""
    return full(self).__index__()


def contains(self: Any, element: Any) -> bool:
    """``element in x``."""
    return bool((element == self).any().item())
