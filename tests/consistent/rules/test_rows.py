"""Every row proven by brute force on the examples of its family (`examples_<family>.py`)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from consistent.rules import ROWS, find
from consistent.tensor.naming import know
from tests.brute_force import Example

FAMILIES = {
    path.stem.removeprefix("examples_"): importlib.import_module(
        f"tests.consistent.rules.{path.stem}"
    ).EXAMPLES
    for path in sorted(Path(__file__).parent.glob("examples_*.py"))
}
EXAMPLES = [example for examples in FAMILIES.values() for example in examples]


@pytest.mark.parametrize("case", EXAMPLES, ids=repr)
def test_every_claimed_signature_is_right(case: Example) -> None:
    case.check(ranks=3)


@pytest.mark.parametrize("case", EXAMPLES, ids=repr)
def test_axes_choose_independently(case: Example) -> None:
    case.check(ranks=(2, 2))


@pytest.mark.parametrize("names", sorted({row.names for row in ROWS.values()}))
def test_row_has_an_example(names: str) -> None:
    row = find(names.split()[0])
    assert any(find(know(case.func).name) is row for case in EXAMPLES), f"no example for {row}"
