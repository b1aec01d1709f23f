"""Changes of torch modules that are made when the module is imported.

This is for modules that are slow to import and that most programs never import.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_changes: dict[str, Callable[[Any], None]] = {}


def change_module(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change(module)`` for the module ``name``: at once if it is imported, else after that.

    The importing program sees the changed module.
    """
    if name in sys.modules:
        change(sys.modules[name])
    _changes[name] = change
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that makes the loader of a module call the change registered for the module.

    It leaves it to the other finders to find the module.
    """

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        change = _changes.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            module_spec: ModuleSpec | None = (
                None if finder is self else finder.find_spec(name, path)
            )
            if module_spec is not None and module_spec.loader is not None:
                _change_after(module_spec.loader, change)
                return module_spec
        return None


def _change_after(loader: Any, change: Callable[[Any], None]) -> None:
    """Make ``loader`` call ``change(module)`` after it has executed a module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module
