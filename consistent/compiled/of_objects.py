"""Compiled steps of methods, stored on the object that the method is bound to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_NAME = "_consistent_steps"


class OfObjects:
    """Table of the results of ``make`` for each object.

    A result refers to its object, so it is stored on the object and is collected with it. In a
    table here, the two would keep each other alive.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._without_dict: Any = weakref.WeakKeyDictionary()

    def __getitem__(self, owner: Any) -> Any:
        if hasattr(owner, "__dict__"):
            steps = owner.__dict__.get(_NAME)
            # A copy of an object shares the original's entry, whose owner is another object.
            if steps is None or steps.owner() is not owner:
                steps = owner.__dict__[_NAME] = _Steps(owner)
            made = steps.made
        else:
            made = self._without_dict.setdefault(owner, {})
        if self not in made:
            made[self] = self._make(owner)
        return made[self]


class _Steps:
    """The compiled steps of one object. Copies and pickles of the object get None instead."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.made: dict[OfObjects, Any] = {}

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
