"""Docstrings: their first line says what the thing is or does, without another one before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_repository import ROOT

# Each needs a noun that is not there: "Of each rank, the peak" says of what, and not what.
OPENINGS = ("Of ", "That of", "Those of", "The same", "Its ", "As ", "By ", "Theirs", "None ")
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _first_lines() -> Iterator[tuple[str, str]]:
    for top in ("consistent", "mirrored"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node)
                if text:
                    where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield where, text.partition("\n")[0]


def test_the_first_line_of_a_docstring_stands_alone() -> None:
    lines = list(_first_lines())
    assert len(lines) > 3000
    assert [line for line in lines if line[1].startswith(OPENINGS)] == []
