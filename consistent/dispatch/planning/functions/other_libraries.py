"""Ops of other libraries that are ops of torch's by another name, and so have a row. Nothing is
known of all others, which run whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of torch's grouped product


def _grouped_mm(input: Any, weight: Any, offs: Any) -> Any:
    """What transformers calls where torch.compiler.is_compiling(), as Inductor compiles no
    torch._grouped_mm."""
    same = input.dtype in _GROUPED and input.dtype == weight.dtype
    return F.grouped_mm(input, weight, offs=offs) if same else NotImplemented


# Name -> a function that gives NotImplemented for the calls that are none of torch's.
SAME: dict[str, Callable[..., Any]] = {"transformers::grouped_mm_fallback": _grouped_mm}
