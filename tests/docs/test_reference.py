"""Every public name has a docstring and its place in docs/reference/, which shows it as it is."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.generated import DOCS, generator

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
MAKE = generator("make_reference")
VALUES = tuple[int, ...]  # mirrored.Ranks: an alias, which has no docstring of its own


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_a_public_name_has_a_docstring_and_is_in_the_reference(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    assert value == VALUES or documented(value), f"{package}.{name} has no docstring"
    page = (DOCS / "reference" / f"{PAGES[package]}.md").read_text()
    assert re.search(rf"\b{re.escape(package)}\.{name}\b", page), (
        f"put <!-- ::: {package}.{name} --> and <!-- end --> into reference/{PAGES[package]}.md"
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


@pytest.mark.parametrize("path", MAKE.PAGES, ids=lambda path: path.stem)
def test_a_page_shows_signatures_and_docstrings_as_they_are(path: Path) -> None:
    if path.stem == "integrations":
        for library in ("transformers", "accelerate", "lightning", "torchmetrics"):
            pytest.importorskip(library)
    page = path.read_text()
    assert page == MAKE.written(page), "run python docs/make_reference.py"
    assert not re.findall(r"^#+ \S+\n\n<!-- end -->$", page, re.MULTILINE), "an entry is empty"


def test_an_entry_is_the_function_and_no_module_of_its_name() -> None:
    for page in MAKE.PAGES:
        if page.stem == "integrations":
            continue  # what it names is imported from its file
        for path in re.findall(r"^<!-- ::: (\S+)", page.read_text(), re.MULTILINE):
            value, is_meant = MAKE.found(path), page.stem == "flow"
            assert not inspect.ismodule(value) or is_meant, f"{page.name}: name the file's {path}"


def test_every_argument_of_a_function_with_arguments_listed_is_listed() -> None:
    lacking = {}
    for package, name in NAMES:
        value = getattr(importlib.import_module(package), name)
        text = inspect.getdoc(value) or ""
        if not inspect.isfunction(value) or "Args:" not in text:
            continue
        names = [
            each.name
            for each in inspect.signature(value).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        lacking[f"{package}.{name}"] = [n for n in names if not re.search(rf"\b{n}\b", text)]
    assert lacking["consistent.parallelize"] == [] and not any(lacking.values()), lacking


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
