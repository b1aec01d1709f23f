"""Plans of ops over lists of tensors."""

from __future__ import annotations

from typing import Any

from ..plans.plan import RUN, Plan
from ..plans.shards import HookOff, retype
from . import moved_views


class OnLists(Plan):
    """torch's function on lists of shards; all tensors of a position share one layout."""

    kind = "list"
    way = RUN

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        if self.inplace and moved_views.alive:
            moved_views.refuse_moved(self.name, args, kwargs)
            for x in tensors:
                moved_views.wrote(x)
        assert self.function is not None
        with HookOff():
            return retype(self.function(*args, **kwargs), self.outs)  # type: ignore[arg-type]
