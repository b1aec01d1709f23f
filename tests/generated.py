"""The programs that write pages of docs/, for tests that compare the pages with what they write."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def generator(name: str) -> Any:
    """The module of ``docs/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
