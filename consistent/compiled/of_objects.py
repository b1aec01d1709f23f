"""Storage for the compiled steps of methods: on the object to which the method is bound."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_ATTRIBUTE = "_consistent_steps"


class PerObject:
    """Mapping from an object to the result of ``make(object)``, which is made at the first lookup.

    A compiled method uses it to have one ``CompiledStep`` per object. That step refers to its
    object, so it is stored on the object and is collected with it; in a table here, the two would
    keep each other alive.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make_step = make
        self._without_dict: Any = weakref.WeakKeyDictionary()

    def __getitem__(self, owner: Any) -> Any:
        if hasattr(owner, "__dict__"):
            steps = owner.__dict__.get(_ATTRIBUTE)
            # A copy of an object shares the original's entry, whose owner is another object.
            if steps is None or steps.owner() is not owner:
                steps = owner.__dict__[_ATTRIBUTE] = _Steps(owner)
            by_mapping = steps.by_mapping
        else:
            by_mapping = self._without_dict.setdefault(owner, {})
        if self not in by_mapping:
            by_mapping[self] = self._make_step(owner)
        return by_mapping[self]


class _Steps:
    """Compiled steps of one object, stored in its ``__dict__``.

    Copies and pickles of the object get None instead, because a compiled step belongs to its
    object.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.by_mapping: dict[PerObject, Any] = {}

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
