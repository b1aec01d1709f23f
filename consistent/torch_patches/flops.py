"""``FlopCounterMode`` counts from the shapes of an op's inputs, which are shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch.plans.shards import is_global, plain
from .on_import import change_module


def _change(flop_counter: Any) -> None:
    """Below autograd a saved global tensor is the same object, and its shape would be the logical
    one beside a gradient that is a shard. The count is that of this rank."""
    original: Callable[[Any], Any] = flop_counter.get_shape

    def get_shape(x: Any) -> Any:
        return original(plain(x) if is_global(x) else x)

    flop_counter.get_shape = get_shape


def install() -> None:
    """Change it once it is imported, which takes Triton's 70 MB where that is installed."""
    change_module("torch.utils.flop_counter", _change)
