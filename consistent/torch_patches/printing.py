"""A change for torch's printing, so that a single rank may print a global tensor.

torch's own code would read values, which is a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import _tensor_str

from ..dispatch.plans.shards import is_global
from ..tensor.inspection.printing import text_of


def install() -> None:
    """Patch the function behind ``torch._tensor_str._str(x)`` to return this library's text.

    Libraries call it for the text of a tensor. Nothing is communicated.
    """
    module: Any = _tensor_str
    module._str_intern = _with_global_text(module._str_intern)


def _with_global_text(original: Callable[..., str]) -> Callable[..., str]:
    """Return ``original`` with this library's text for global tensors."""

    @functools.wraps(original)
    def text(inp: Any, **contents: Any) -> str:
        return text_of(inp) if is_global(inp) else original(inp, **contents)

    return text
