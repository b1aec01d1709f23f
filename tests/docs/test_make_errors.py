"""docs/errors.md has every message of the source, and when_it_goes_wrong.md speaks of real ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.generated import DOCS, generator

MAKE = generator("make_errors")


@pytest.fixture(scope="module", autouse=True)
def _sources_are_read_while_they_are_needed() -> Iterator[None]:
    """Not when tests are collected, which every worker does; and their syntax trees, of millions of
    objects, are let go."""
    yield
    MAKE.files.cache_clear()


def test_the_page_is_what_the_generator_writes() -> None:
    assert (DOCS / "errors.md").read_text() == MAKE.page(), "run python docs/make_errors.py"


def test_every_raise_with_words_has_its_entry() -> None:
    page = _plain((DOCS / "errors.md").read_text())
    missing = []
    for file in MAKE.files():
        for call in file.raised:
            words = "".join(_longest(arg) for arg in call.args[:1])
            internal = ast.unparse(call.func).rpartition(".")[2] in MAKE.INTERNAL
            if not internal and " " in words and words not in page:
                missing.append(f"{file.name}:{call.lineno}: {words}")
    assert not missing, "\n".join(["run python docs/make_errors.py", *missing])


def _longest(node: ast.expr) -> str:
    """The longest piece of text that is written out in an expression."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return max((_plain(t) for t in texts if isinstance(t, str)), key=len, default="")


def _plain(text: str) -> str:
    return " ".join(text.split())


def test_each_cause_and_cure_is_of_a_message_that_exists() -> None:
    words = _plain((DOCS / "errors.md").read_text())
    heads = re.findall(r"^### (.*)$", (DOCS / "when_it_goes_wrong.md").read_text(), re.MULTILINE)
    quoted = [part for head in heads for part in re.findall(r"`([^`]+)`", head)]
    assert len(quoted) >= 30
    assert not [part for part in quoted if part not in words]


def test_helpers_that_make_errors_are_found() -> None:
    words = {message.words for message in MAKE.messages()}
    assert 'it has no single "->"' in words  # given to a method that makes the error
    assert any(w.startswith("plan_of: this {name} was not parallelized") for w in words)
