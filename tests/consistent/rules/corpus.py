"""The examples of all rows, by family; `tests.each_of.each` goes through those of one."""

from __future__ import annotations

import importlib
from pathlib import Path

FAMILIES = {
    path.stem: importlib.import_module(f"tests.consistent.rules.examples.{path.stem}").EXAMPLES
    for path in sorted((Path(__file__).parent / "examples").glob("*.py"))
    if path.stem not in ("__init__", "numbers")
}
EXAMPLES = [example for examples in FAMILIES.values() for example in examples]
