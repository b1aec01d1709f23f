"""Ops of other libraries that compute the same as an op of torch, and so use that op's rule.

All other ops of other libraries are unknown, so every rank runs them on gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# Dtypes of torch's grouped matmul.
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _grouped_mm(input: Any, weight: Any, offs: Any) -> Any:
    """Compute transformers' fallback of the grouped matmul by ``F.grouped_mm``.

    Transformers calls its fallback while ``torch.compiler.is_compiling()``, because Inductor does
    not compile ``torch._grouped_mm``. Returns ``NotImplemented`` for dtypes that ``F.grouped_mm``
    does not accept; the fallback then runs on gathered tensors.
    """
    same = input.dtype in _GROUPED_DTYPES and input.dtype == weight.dtype
    return F.grouped_mm(input, weight, offs=offs) if same else NotImplemented


# Op name -> replacement, which returns NotImplemented for calls that torch's op does not accept.
REPLACEMENTS: dict[str, Callable[..., Any]] = {"transformers::grouped_mm_fallback": _grouped_mm}
