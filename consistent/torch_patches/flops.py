"""A change for ``FlopCounterMode``: it counts the work of this rank, by shapes of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch.plans.shards import is_global, plain
from .on_import import change_module


def _change(flop_counter: Any) -> None:
    """Make the counter use the shape of the shard for a global tensor.

    Below autograd a saved tensor is still the global object, with a logical shape, while its
    gradient is a shard. The count is that of this rank.
    """
    original: Callable[[Any], Any] = flop_counter.get_shape

    def get_shape(x: Any) -> Any:
        return original(plain(x) if is_global(x) else x)

    flop_counter.get_shape = get_shape


def install() -> None:
    """Change the module when it is imported, because the import takes memory.

    It loads Triton's 70 MB where Triton is installed.
    """
    change_module("torch.utils.flop_counter", _change)
