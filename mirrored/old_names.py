"""Old names of methods of a transport, for code that was written with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def _renamed(old: str, new: str) -> Callable[..., Any]:
    """Return a method that calls the method ``new`` and warns that ``old`` is its old name."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"Transport.{old} is now called {new}; the old name will be removed.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)(*args, **kwargs)

    method.__name__, method.__doc__ = old, f"Deprecated name of ``{new}``."
    return method


class OldNames:
    """Base class of a transport with its methods' old names, which still work."""

    join = _renamed("join", "all_gather_into_tensor")
    join_several = _renamed("join_several", "all_gather_several")
    start_join_several = _renamed("start_join_several", "start_all_gather_several")
    turn = _renamed("turn", "all_to_all_single")
