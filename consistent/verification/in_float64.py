"""Run in float64 the ops that torch does not have in float64, for a step's exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max


def call(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call ``func(*args, **kwargs)``, or compute its result if torch lacks it in float64.

    The step's reference run is in float64, and calls all its ops by this function.
    """
    if func in _GROUPED_MM_OPS and all(x.dtype is torch.float64 for x in args[:2]):
        return _grouped_mm(*args, **kwargs)
    if func is torch.full and kwargs.get("dtype") is None and abs(args[1]) > _FLOAT32_MAX:
        kwargs = kwargs | {"dtype": torch.float64}  # such as finfo(x.dtype).min of a float64 x
    return func(*args, **kwargs)


_GROUPED_MM_OPS = {
    f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f
}


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``torch.nn.functional.grouped_mm`` by one matmul for each group.

    ``offs`` has the end index of each group, along the dim of ``a`` or ``b`` that is divided into
    groups; None for a batch of matrices.
    """
    if offs is None:
        out = a @ b
    else:
        ends = offs.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if a.ndim == b.ndim == 2:
            out = torch.stack([a[:, group] @ b[group] for group in groups])
        elif a.ndim == 2:
            out = torch.cat([a[group] @ b[k] for k, group in enumerate(groups)])
        else:
            out = torch.cat([a[k] @ b[:, group] for k, group in enumerate(groups)], 1)
    return out if bias is None else out + bias
