"""What a transport does once, in its first call, is none of the user's program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, dispatch and function modes of the user's see no op, and none is recorded.

    A mode that saves what ops give in one run and hands it out in the next, as selective activation
    checkpointing does, would else count those of the first run.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
