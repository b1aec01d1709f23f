"""Values that torch's op refuses, and that a form must not hide: it masks what other ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor

# For the others torch raises IndexError.
_RUNTIME_ERRORS = frozenset(
    "gather take_along_dim scatter scatter_add scatter_reduce embedding_bag".split()
)
# Ops that count from the end where an index is negative; the others refuse it.
_COUNT_FROM_THE_END = frozenset("getitem setitem index index_put index_fill take put".split())
# What is raised with a text: torch's own check raises RuntimeError with any.
kinds: dict[str, type[Exception]] = {}


def need_in_range(index: Tensor, size: int, name: str, ndim: int = 1) -> None:
    """Raise what torch does for op ``name`` on a tensor of ``ndim`` dims, unless every index is one
    of ``size`` items."""
    by_rows = name == "index_add" and ndim > 1
    kind = RuntimeError if by_rows or name in _RUNTIME_ERRORS else IndexError
    low = -size if name in _COUNT_FROM_THE_END else 0
    need(((index >= low) & (index < size)).all(), f"{name}: index out of range", kind)


def need(ok: Tensor, text: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise ``kind`` unless ``ok``; a step that is recorded checks it in each run."""
    kinds[text] = kind
    try:
        torch._assert_async(ok, text)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:
        raise kind(str(error)) from None
