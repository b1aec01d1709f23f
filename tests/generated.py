"""The programs that write pages of docs/, for tests that compare the pages with what they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.scripts import module_of

DOCS = Path(__file__).parents[1] / "docs"


def generator(name: str) -> Any:
    """The module of ``docs/<name>.py``."""
    return module_of(DOCS / f"{name}.py")
