"""Properties of a tensor that are views: ``T``, ``mT``, ``H``, ``mH``, ``real``, ``imag``.

None of them moves data.
"""

from __future__ import annotations

from typing import Any

import torch


def all_reversed(x: Any) -> Any:
    """Return ``x.T``: ``x`` with all dims reversed."""
    return x.permute(tuple(range(x.ndim - 1, -1, -1)))


def last_two_swapped(x: Any) -> Any:
    """Return ``x.mT``; for a 0-d tensor the tensor itself, as in torch."""
    return x.transpose(-2, -1) if x.ndim else x


def conjugate_transpose(x: Any) -> Any:
    """Return ``x.H`` or ``x.mH``: ``x`` with its last two dims swapped, conjugated."""
    return x.adjoint() if x.ndim else x


def real_part(x: Any) -> Any:
    """Return ``x.real``; for a real tensor the tensor itself."""
    return torch.real(x) if x.is_complex() else x


def imaginary_part(x: Any) -> Any:
    """Return ``x.imag``; raises for a real tensor."""
    if not x.is_complex():
        raise RuntimeError(
            f"imag: x is {x._spec}, and only complex numbers have imaginary parts. Use "
            "torch.zeros_like(x), or torch.complex(x, y) first."
        )
    return torch.imag(x)
