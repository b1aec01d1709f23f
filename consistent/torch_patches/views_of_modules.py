"""``module.to(nn.graph.GraphModule)``: what the documents call to say in which stage a module
runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Classes that a module can be seen as, by ``module.to(cls)``; those floors above enter them here.
views: set[type] = set()


def install() -> None:
    """Patch ``torch.nn.Module.to``."""
    original: Callable[..., Any] = torch.nn.Module.to

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], type) and args[0] in views:
            return args[0](self)
        return original(self, *args, **kwargs)

    torch.nn.Module.to = to  # type: ignore[method-assign]
