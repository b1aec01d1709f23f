"""Hides a transport's own tensor ops from the user's modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide the ops inside the block from the user's dispatch and function modes, and from autograd.

    A transport does some work only in its first call. A mode that saves the results of ops in one
    run and replays them in the next, as selective activation checkpointing does, would otherwise
    count ops that only the first run has.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
