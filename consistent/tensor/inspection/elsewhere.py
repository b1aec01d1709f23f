"""Attributes of tensors of other libraries, such as DTensor: reading one raises with a hint.

The hint says what to use in this library.
"""

from __future__ import annotations

from typing import Any

from ...spec.elsewhere import OF_TENSORS, hint
from ..global_tensor import GlobalTensor


class _Elsewhere:
    """Descriptor for an attribute that tensors of another library have, such as DTensor's.

    Reading it raises an AttributeError with a hint, so that ``hasattr`` is False. If a program sets
    an attribute of this name on an object, that is read.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, x: Any, cls: Any = None) -> Any:
        raise AttributeError(
            f"GlobalTensor has no attribute {self._name!r}{hint(self._name, OF_TENSORS)}",
            name=self._name,
            obj=cls if x is None else x,
        )


def _enter() -> None:
    for name in OF_TENSORS:
        if not hasattr(GlobalTensor, name):  # a later torch may have it
            setattr(GlobalTensor, name, _Elsewhere(name))


_enter()
