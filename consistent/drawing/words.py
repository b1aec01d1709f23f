"""The short texts that pages and listings have in common: of places in a program, of layouts, of
times."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..spec import TensorSpec

_SITE = re.compile(r"(.+?):(\d+)(?= in |$)")  # a folder's name may hold " in ", too


def site_of(where: str) -> str:
    """``file:line`` of ``file:line in function``."""
    found = _SITE.match(where)
    return found[0] if found else where


def short_site(where: str) -> str:
    """``train.py:12`` of ``/folder/train.py:12``, with ``in function`` after it or without."""
    found = _SITE.match(where)
    return f"{Path(found[1]).name}:{found[2]}" if found else where


def source_line(where: str) -> str:
    """The text of the line at ``file:line``; "" where there is none."""
    found = _SITE.match(where)
    return linecache.getline(found[1], int(found[2])).strip() if found else ""


def times(text: str, count: int) -> str:
    """``3x text``."""
    return f"{count}x {text}" if count > 1 else text


def layout_text(spec: TensorSpec | None, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """``f32[4, 8] S(0)`` of a spec; of a plain tensor ``float32[4, 8]``."""
    if spec is None:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return str(spec).partition(" on ")[0]


def sbp_text(spec: TensorSpec) -> str:
    """``S(0), B``: the SBP of each axis."""
    return ", ".join(map(str, spec.sbp))


def seconds_text(value: float) -> str:
    """``0.0012`` as ``1.2 ms``."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
