"""Functions of a user's program with their source lines, for pages that show them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

_Span = tuple[int, int, str]  # first line, last line, qualified name


@dataclass
class Function:
    """Function of the user's code, with the numbers of its lines that a page refers to.

    Args:
        file, name: its file and qualified name.
        first: its first line.
        lines: numbers of the lines, such as those whose ops a report lists.
    """

    file: str
    name: str
    first: int
    lines: list[int] = field(default_factory=list)

    def source(self, most: int = 4) -> Iterable[tuple[int, str] | None]:
        """Yield (number, text) of source lines, from the function's first to the last of ``lines``.

        More than ``most`` consecutive lines that are not in ``lines`` are left out, and None is
        yielded instead of them.
        """
        used, file_lines = sorted(set(self.lines)), linecache.getlines(self.file)
        shown_lines = {*used, self.first}
        for before, after in zip([self.first, *used], used):
            between = range(before + 1, after)
            if len(between) <= most:
                shown_lines.update(between)
        texts = {n: file_lines[n - 1].rstrip() if n <= len(file_lines) else "" for n in shown_lines}
        indent = min((len(t) - len(t.lstrip()) for t in texts.values() if t.strip()), default=0)
        previous = None
        for number in sorted(shown_lines):
            if previous is not None and number > previous + 1:
                yield None
            yield number, texts[number][indent:]
            previous = number


def functions(places: Iterable[tuple[str, int, str]]) -> list[Function]:
    """Return the functions that contain the given source lines, in the order first met.

    Args:
        places: (file, line, function name) of each source line. The name is used as it is if the
            file cannot be read or has changed since.
    """
    result: dict[tuple[str, str, int], Function] = {}
    for file, line, name in places:
        first, qualified_name = _enclosing_function(file, line) or (0, name)
        # "<lambda>" is nested.
        if qualified_name.rpartition(".")[2] != name and not name.startswith("<"):
            first, qualified_name = 0, name
        function = result.setdefault(
            (file, qualified_name, first), Function(file, qualified_name, first or line)
        )
        function.first = first or min(function.first, line)
        function.lines.append(line)
    return list(result.values())


def _enclosing_function(file: str, line: int) -> tuple[int, str] | None:
    """Return (first line, qualified name) of the innermost function around a line; None if none."""
    enclosing = [
        (first, name) for first, last, name in _function_spans(file) if first <= line <= last
    ]
    # Of nested functions the innermost has the largest first line.
    return max(enclosing, default=None)


@lru_cache(maxsize=64)
def _function_spans(file: str) -> list[_Span]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    spans: list[_Span] = []

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{path}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    spans.append((child.lineno, child.end_lineno or child.lineno, name))
                visit(child, f"{name}.")
            else:
                visit(child, path)

    visit(tree, "")
    return spans
