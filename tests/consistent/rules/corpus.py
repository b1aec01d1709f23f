"""The examples of all rows, and how a test goes through those of a family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.brute_force import Example

FAMILIES = {
    path.stem: importlib.import_module(f"tests.consistent.rules.examples.{path.stem}").EXAMPLES
    for path in sorted((Path(__file__).parent / "examples").glob("*.py"))
    if path.stem not in ("__init__", "numbers")
}
EXAMPLES = [example for examples in FAMILIES.values() for example in examples]


def each(cases: Iterable[Example], prove: Callable[[Example], object]) -> None:
    """Run `prove` on each case, and raise with the names and errors of all that fail."""
    found = []
    for case in cases:
        try:
            prove(case)
        except Exception as error:  # noqa: BLE001  (all of them are listed together)
            found.append((case, error))
    if found:
        texts = [f"{case}: {type(error).__name__}: {error}" for case, error in found]
        raise AssertionError(f"{len(found)} fail\n" + "\n\n".join(texts)) from found[0][1]
