"""Checks for values that torch's own op rejects.

A form must repeat them where it masks values that belong to other ranks, which hides bad values
from torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Ops for which torch raises RuntimeError at a bad index. For all others it raises IndexError.
_RUNTIME_ERROR_OPS = frozenset(
    "gather take_along_dim scatter scatter_add scatter_reduce embedding_bag".split()
)
# Ops where a negative index counts from the end. All others reject negative indices.
_NEGATIVE_INDEX_OPS = frozenset("getitem setitem index index_put index_fill take put".split())
# Message -> exception type to raise with it. ``torch._assert_async`` raises only RuntimeError.
error_types: dict[str, type[Exception]] = {}


def require_in_range(index: Tensor, size: int, name: str, ndim: int = 1) -> None:
    """Raise the error of torch's op ``name`` unless every index is valid for ``size`` items.

    ``ndim`` is the number of dims of the indexed tensor.
    """
    by_rows = name == "index_add" and ndim > 1
    kind = RuntimeError if by_rows or name in _RUNTIME_ERROR_OPS else IndexError
    low = -size if name in _NEGATIVE_INDEX_OPS else 0
    require(((index >= low) & (index < size)).all(), f"{name}: index out of range", kind)


def require(ok: Tensor, text: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise ``kind`` with ``text`` unless the one-element tensor ``ok`` is True.

    While a step is recorded, the check is an op, which every run of the recorded step repeats.
    """
    error_types[text] = kind
    try:
        torch._assert_async(ok, text)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:
        raise kind(str(error)) from None
