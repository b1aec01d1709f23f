"""Scripts of examples/ and docs/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: Path) -> ModuleType:
    """A script as a module, executed again."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
