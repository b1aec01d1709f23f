"""What ``torch.compiler.is_compiling()`` says while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling(value: bool) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` return ``value`` inside the block.

    Many models skip checks of tensor values while it is true.
    """
    before = torch.compiler._is_compiling_flag  # type: ignore[attr-defined]
    tell_compiling(value)
    try:
        yield
    finally:
        tell_compiling(before)


def tell_compiling(value: bool) -> None:
    """Make ``torch.compiler.is_compiling()`` return ``value`` from now on."""
    torch.compiler._is_compiling_flag = value  # type: ignore[attr-defined]
