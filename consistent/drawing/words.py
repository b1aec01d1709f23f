"""Short texts shared by pages and listings: source locations, layouts and times."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..spec import TensorSpec

_SITE = re.compile(r"(.+?):(\d+)(?= in |$)")  # a folder's name may contain " in ", too


def site_of(where: str) -> str:
    """Return ``file:line`` of a source location ``file:line in function``."""
    match = _SITE.match(where)
    return match[0] if match else where


def short_site(where: str) -> str:
    """Shorten ``/folder/train.py:12`` to ``train.py:12``.

    Text such as ``in function`` after it is removed.
    """
    match = _SITE.match(where)
    return f"{Path(match[1]).name}:{match[2]}" if match else where


def source_line(where: str) -> str:
    """Return the text of the source line at ``file:line``; "" if there is none."""
    match = _SITE.match(where)
    return linecache.getline(match[1], int(match[2])).strip() if match else ""


def times(text: str, count: int) -> str:
    """Return ``text`` as ``3x text`` if ``count`` is more than 1, for repeated lines."""
    return f"{count}x {text}" if count > 1 else text


def layout_text(spec: TensorSpec | None, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return a tensor's dtype, shape and layout as text.

    Examples: ``f32[4, 8] S(0)`` for a global tensor, whose ``spec`` is given; ``float32[4, 8]`` for
    a plain tensor, with ``spec`` None.
    """
    if spec is None:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return str(spec).partition(" on ")[0]


def sbp_text(spec: TensorSpec) -> str:
    """Return the SBPs of all placement axes as text, such as ``S(0), B``."""
    return ", ".join(map(str, spec.sbp))


def seconds_text(value: float) -> str:
    """Return a time in seconds as text: ``0.0012`` as ``1.2 ms``."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
