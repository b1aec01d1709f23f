"""Attributes of tensors of other libraries, such as DTensor: reading one raises with a hint.

The hint says what to use in this library.
"""

from __future__ import annotations

from typing import Any

from ...spec.elsewhere import TENSOR_HINTS, hint
from ..global_tensor import GlobalTensor


class _ForeignAttribute:
    """Descriptor for an attribute that tensors of another library have, such as DTensor's.

    Reading it raises an AttributeError with a hint, so that ``hasattr`` is False. If a program sets
    an attribute of this name on an object, that is read.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, x: Any, cls: Any = None) -> Any:
        raise AttributeError(
            f"GlobalTensor has no attribute {self._name!r}{hint(self._name, TENSOR_HINTS)}",
            name=self._name,
            obj=cls if x is None else x,
        )


def _register_attributes() -> None:
    for name in TENSOR_HINTS:
        if not hasattr(GlobalTensor, name):  # a later torch may have it
            setattr(GlobalTensor, name, _ForeignAttribute(name))


_register_attributes()
