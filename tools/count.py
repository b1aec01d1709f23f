"""Counts what there is of the two packages: `python tools/count.py [FOLDER]`, by default here.

Lines of code are those that hold neither a docstring nor only a comment nor nothing. Comments are
those that say something: no rulers, and none for a tool.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("consistent", "mirrored")
FOR_TOOLS = ("# type:", "# noqa", "# pyright", "# fmt", "# --", "#!")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main(root: Path) -> None:
    """Print all counts."""
    texts = {
        path: path.read_text()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = [len(text.splitlines()) for text in texts.values()]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(n.end_lineno or n.lineno) - n.lineno + 1 for n in functions]
    comments = sum(map(_comments, texts.values()))
    classes = Counter(n.name for n in nodes if isinstance(n, ast.ClassDef) and n.name[0] != "_")
    print(f"Python files                     {len(texts)}")
    print(f"lines                            {sum(lines):,}")
    print(f"lines of code                    {sum(map(_code, texts.values(), trees.values())):,}")
    print(f"comments in 100 lines            {100 * comments / sum(lines):.1f}")
    print(f"files of more than 300 lines     {sum(n > 300 for n in lines)}")
    print(f"functions                        {len(functions):,}")
    print(f"functions of more than 40 lines  {sum(n > 40 for n in lengths)}")
    print(f"lines of the longest function    {max(lengths)}")
    print(f"names that several classes have  {sum(n > 1 for n in classes.values())}")
    print(f"lists of callbacks in modules    {sum(map(_callbacks, trees.values()))}")


def _code(text: str, tree: ast.Module) -> int:
    inside = set(_docstrings(tree))
    return sum(
        bool(line.strip()) and number not in inside and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the number of each line of ``tree`` that belongs to a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and node.body and ast.get_docstring(node) is not None:
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return sum(not comment.startswith(FOR_TOOLS) for comment in found)


def _callbacks(tree: ast.Module) -> int:
    """Return how many empty lists, meant to hold functions, ``tree`` makes at the top of the
    module."""
    return sum(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.List)
        and not node.value.elts
        and any(word in ast.unparse(node.annotation) for word in ("Callable", "Arriving"))
        for node in tree.body
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
