"""Replace the forward of a module, or let it read other values in place of its parameters.

Both are stored in the ``__dict__`` of a module, where Python finds them before the class's
``forward`` and before torch's table of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class ReplacedForward:
    """Base of the callables that replace the forward of a module.

    They are stored in the module's ``__dict__``, which Python searches before the class. Classes
    and not closures, so that a module with one can be copied and pickled.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner = module.__dict__.get("forward")

    def install(self) -> None:
        """Make calls of the module run this object in place of its forward."""
        self.module.__dict__["forward"] = self

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that the module had before, and return its result."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def restore_forward(module: nn.Module) -> None:
    """Undo ``install`` for ``module``, which may be a copy of the one it was called for."""
    inner = module.__dict__.pop("forward").inner
    if inner is not None:
        module.__dict__["forward"] = inner


@contextmanager
def attributes_replaced(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Let attributes of ``module`` have other values inside the context.

    The module's forward then reads these in place of its parameters.

    Args:
        module: the module.
        values: name of an attribute -> its value. A name inside a submodule has dots, as in
            ``w1.weight``.
    """
    places = []
    for name, value in values.items():
        path, _, key = name.rpartition(".")
        places.append((module.get_submodule(path).__dict__, key, value))
    previous = [
        (attributes, key, attributes[key]) for attributes, key, _ in places if key in attributes
    ]
    for attributes, key, value in places:
        attributes[key] = value
    try:
        yield
    finally:
        for attributes, key, _ in places:
            del attributes[key]
        for attributes, key, value in previous:
            attributes[key] = value
