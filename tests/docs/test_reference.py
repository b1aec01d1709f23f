"""Every public name has a docstring and its place in docs/reference/."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from tests.generated import DOCS

PAGES = {
    "consistent": "consistent",
    "consistent.nn": "nn",
    "consistent.data": "data",
    "consistent.checkpoint": "checkpoint",
    "consistent.flow": "flow",
    "mirrored": "mirrored",
}
NAMES = [(package, name) for package in PAGES for name in importlib.import_module(package).__all__]
IDS = [f"{package}.{name}" for package, name in NAMES]
VALUES = tuple[int, ...]  # mirrored.Ranks: an alias, which has no docstring of its own


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_a_public_name_has_a_docstring_and_is_in_the_reference(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    assert value == VALUES or documented(value), f"{package}.{name} has no docstring"
    page = (DOCS / "reference" / f"{PAGES[package]}.md").read_text()
    assert re.search(rf"\b{re.escape(package)}\.{name}\b", page), (
        f"put ::: {package}.{name} into docs/reference/{PAGES[package]}.md"
    )


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_public_methods_have_docstrings(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if not inspect.isclass(value):
        return
    lacking = [
        attribute
        for attribute, given in vars(value).items()
        if inspect.isfunction(given)
        and given.__qualname__ == f"{value.__name__}.{attribute}"
        and not (attribute.startswith("_") or given.__doc__)
    ]
    assert not lacking, f"{package}.{name} has methods without docstrings"


def test_no_entry_shows_a_module_in_place_of_a_function_of_its_name() -> None:
    for page in (DOCS / "reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            package, _, name = path.rpartition(".")
            place = DOCS.parent / path.replace(".", "/")
            is_module = place.is_dir() or place.with_suffix(".py").exists()
            value = getattr(importlib.import_module(package), name, None) if is_module else None
            assert not is_module or inspect.ismodule(value), f"{page.name}: name the file's {name}"


def test_an_entry_of_a_docstring_is_of_one_argument() -> None:
    # What builds the reference looks each up by its name.
    for package, name in NAMES:
        text = inspect.getdoc(getattr(importlib.import_module(package), name)) or ""
        sections = re.findall(r"^Args:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        joined = re.findall(r"^ +\w+(?:, \w+)+: .*$", "\n".join(sections), re.MULTILINE)
        assert not joined, f"{package}.{name}: {joined}"


def documented(value: Any) -> bool:
    """Whether a name says what it is; a value is documented by its class."""
    own = value if inspect.isclass(value) or hasattr(value, "__doc__") else type(value)
    return bool(inspect.getdoc(own))
