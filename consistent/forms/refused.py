"""Values that torch's op refuses, and that a form must not hide: it masks what other ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor

# For the others torch raises IndexError.
_RUNTIME_ERRORS = frozenset(
    "gather take_along_dim scatter scatter_add scatter_reduce embedding_bag".split()
)
# What is raised with a text: torch's own check raises RuntimeError with any.
kinds: dict[str, type[Exception]] = {}


def need_in_range(index: Tensor, low: int, end: int, name: str) -> None:
    """Raise what torch does for op ``name`` unless ``low <= index < end``."""
    kind = RuntimeError if name in _RUNTIME_ERRORS else IndexError
    need(((index >= low) & (index < end)).all(), f"{name}: index out of range", kind)


def need(ok: Tensor, text: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise ``kind`` unless ``ok``; a step that is recorded checks it in each run."""
    kinds[text] = kind
    try:
        torch._assert_async(ok, text)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:
        raise kind(str(error)) from None
