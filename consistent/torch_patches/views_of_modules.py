"""A change for ``module.to(nn.graph.GraphModule)``, which returns a view of a module.

Through the view a program sets the pipeline stage of the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Classes that ``module.to(cls)`` accepts; the packages that define them add them here.
views: set[type] = set()


def install() -> None:
    """Patch ``torch.nn.Module.to``, so that it also accepts the classes in ``views``."""
    original: Callable[..., Any] = torch.nn.Module.to

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], type) and args[0] in views:
            return args[0](self)
        return original(self, *args, **kwargs)

    torch.nn.Module.to = to  # type: ignore[method-assign]
