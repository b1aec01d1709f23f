"""Examples of rows, run on plain and on global tensors in every layout of each operand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from consistent import B, P, S
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.spec import Sbp
from tests.brute_force import Example
from tests.twins import Laid, assert_same

FAMILIES = sorted(
    path.stem
    for path in (Path(__file__).parent / "examples").glob("*.py")
    if path.stem not in ("__init__", "numbers", "random")
)
Layout = tuple[Sbp, ...]
# Which of equal numbers comes first, the order of eigenvalues and signs of vectors are open.
OPEN = """argsort sort msort topk
    linalg_eig linalg_eigvals linalg_eigh _linalg_eigh _linalg_svd linalg_svd svd
    new_empty new_empty_strided empty_like geqrf""".split()


def examples(family: str) -> list[Example]:
    """The examples of a family whose values are compared."""
    module = importlib.import_module(f"tests.consistent.rules.examples.{family}")
    return [
        case for case in module.EXAMPLES if case.reference is None and name_of(case) not in OPEN
    ]


def name_of(case: Example) -> str:
    """The name of the case's row."""
    return resolve(case.func).name


def changed(case: Example, change: Callable[[Any], Any]) -> Example:
    """``case`` with ``change`` applied to each of its arguments, those in tuples and lists too.
    Torch has few ops of float8: such tensors are changed as float32."""

    def one(x: Any) -> Any:
        if not _is_float8(x):
            return change(x)
        made = change(x.float())
        return made.to(x.dtype) if made.is_floating_point() else made

    return Example(case.func, tree_map(one, case.args), tree_map(one, case.kwargs))


def _is_float8(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() == 1


def layouts(case: Example) -> Iterator[Layout]:
    """One operand split or partial while the others are whole; and all of them split alike."""
    tensors = tensors_of(case)
    count = len(tensors)
    for i, x in enumerate(tensors):
        entries: list[Sbp] = [S(d) for d in range(x.ndim)]
        if x.is_floating_point() and not _is_float8(x):
            entries.append(P)
        for entry in entries:
            yield tuple(entry if j == i else B for j in range(count))
    if count > 1:
        for d in range(max(x.ndim for x in tensors)):
            yield tuple(S(d) if x.ndim > d else B for x in tensors)


def tensors_of(case: Example) -> list[torch.Tensor]:
    """The tensors among its arguments."""
    leaves = tree_leaves((case.args, case.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def run(case: Example, at: Laid, layout: Layout) -> Any:
    """What comes out, and what an op in place has made of its first operand."""
    source = iter(layout)

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        entry = next(source)
        return at(x.detach(), entry if not entry.is_split or x.ndim > entry.dim else B)  # type: ignore[attr-defined]

    args, kwargs = tree_map(one, (case.args, case.kwargs))
    out = case.func(*args, **kwargs)
    return (out, args[0]) if resolve(case.func).inplace else out


def wanted(case: Example) -> Any:
    """What plain torch gives; None where it refuses."""
    try:
        return run(case, Laid(None), (B,) * len(tensors_of(case)))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def differs(case: Example, at: Laid, layout: Layout, want: Any) -> str:
    """How ``case`` on global tensors differs from ``want``; "" where it does not."""
    try:
        assert_same(run(case, at, layout), want)
    except Exception as error:  # noqa: BLE001  (all of them are listed together)
        return f"{case} {layout}: {type(error).__name__} {str(error)[:300]}"
    return ""
