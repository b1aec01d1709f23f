"""Steps of methods, kept on the object whose method it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_NAME = "_consistent_steps"


class OfObjects:
    """What ``make`` gives for each object. It refers to its object, so it is kept there and goes
    with it: in a table here each would keep the other alive."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._without_dict: Any = weakref.WeakKeyDictionary()

    def __getitem__(self, owner: Any) -> Any:
        if hasattr(owner, "__dict__"):
            steps = owner.__dict__.get(_NAME)
            if steps is None or steps.owner() is not owner:  # that of what it is a copy of
                steps = owner.__dict__[_NAME] = _Steps(owner)
            made = steps.made
        else:
            made = self._without_dict.setdefault(owner, {})
        if self not in made:
            made[self] = self._make(owner)
        return made[self]


class _Steps:
    """The compiled steps of one object."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.made: dict[OfObjects, Any] = {}

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
