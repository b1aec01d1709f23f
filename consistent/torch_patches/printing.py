"""Torch's printing reads values, and a rank may print alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import _tensor_str

from ..dispatch.plans.shards import is_global
from ..tensor.inspection.printing import text_of


def install() -> None:
    """``torch._tensor_str._str(x)``, which libraries call for the text of a tensor, gives the text
    of a global one without the other ranks."""
    module: Any = _tensor_str
    module._str_intern = _texts(module._str_intern)


def _texts(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def text(inp: Any, **contents: Any) -> str:
        return text_of(inp) if is_global(inp) else original(inp, **contents)

    return text
