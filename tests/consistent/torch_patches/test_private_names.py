"""The lists of private names of torch hold all that the sources use, and this torch has each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import consistent
from consistent.torch_patches import private_names

TOP = Path(consistent.__file__).parents[1]
CSRC = Path(__file__).parents[3] / "csrc"
PRIVATE_HEADER = re.compile(
    r"#include <(torch/csrc/[^>]+|c10/core/impl/[^>]+|ATen/(?:ThreadLocalState|"
    r"PythonTorchFunctionTLS|core/dispatch/Dispatcher)\.h)>"
)


def dotted(tree: ast.AST) -> Iterator[str]:
    """Each name below torch that is imported or reached by attributes, in full."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name
                if each.asname:
                    known[each.asname] = each.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
                yield f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *parts])


def private(name: str) -> str | None:
    """The name without attributes that every object has, if it is one of torch's private ones."""
    name = re.sub(r"\.__.*", "", name)
    name = re.sub(r"(virtualized\.V)\..*", r"\1", name)  # filled while a graph is compiled
    is_op = name.startswith("torch.ops.")
    return name if name.startswith("torch.") and "._" in name and not is_op else None


def used() -> set[str]:
    found = set()
    for package in ("consistent", "mirrored"):
        for path in (TOP / package).rglob("*.py"):
            found |= {private(name) for name in dotted(ast.parse(path.read_text()))} - {None}
    return {name for name in found if not any(n.startswith(f"{name}.") for n in found)}


def test_the_list_has_each_private_name_that_is_used_and_no_other() -> None:
    assert set(private_names.NAMES + private_names.LAZY_NAMES) == used()


def test_the_list_has_each_private_header_that_is_included_and_no_other() -> None:
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    included = {h for path in sources for h in PRIVATE_HEADER.findall(path.read_text())}
    assert set(private_names.HEADERS) == included


def test_this_torch_has_all_names() -> None:
    for name in private_names.LAZY_NAMES:  # the longest part of it that is a module is imported
        for parent in range(name.count(".") + 1):
            try:
                import_module(name.rsplit(".", parent)[0])
            except ImportError:
                continue
            break
    assert private_names.missing_names(private_names.NAMES + private_names.LAZY_NAMES) == []


@pytest.mark.parametrize("name", ["torch._C._current_graph_task_id", "torch._tensor_str._str"])
def test_a_torch_that_lacks_a_name_is_refused_by_that_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(name)
    with pytest.raises(RuntimeError, match="install one of these") as error:
        private_names.check_names()
    assert f"torch {torch.__version__} has no {name}, which" in str(error.value)
