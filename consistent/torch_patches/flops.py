"""A change for ``FlopCounterMode``: it counts the work of this rank, by shapes of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch.plans.shards import is_global, plain
from .on_import import change_module


def _change(flop_counter: Any) -> None:
    """Make torch's counter use the shapes of shards, so that it counts the work of this rank.

    Below autograd a saved tensor is still the global object, with a logical shape, while its
    gradient is a shard.
    """
    original: Callable[[Any], Any] = flop_counter.get_shape

    def get_shape(x: Any) -> Any:
        return original(plain(x) if is_global(x) else x)

    flop_counter.get_shape = get_shape


def install() -> None:
    """Change torch's module when it is imported, not before, because the import takes memory.

    It loads Triton's 70 MB where Triton is installed.
    """
    change_module("torch.utils.flop_counter", _change)
