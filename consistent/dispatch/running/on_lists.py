"""Plan of an op over lists of tensors, run on the lists of their shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..plans.plan import RUN, Plan
from ..plans.shards import HookOff, retype
from . import moved_views
from .writes import count_write


class OnLists(Plan):
    """Plan that calls a foreach op (``torch._foreach_*``) or fused step once, on lists of shards.

    Used if all tensors at one index of the lists share one layout. ``one_by_one`` runs the op for
    each index by itself. It is called instead if an in-place op writes into a moved view (a view
    whose data boxing has copied), since the write must reach the view's source.
    """

    kind = "list"
    way = RUN
    one_by_one: Callable[..., Any] | None = None  # the same op, called for each index

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        if self.inplace and moved_views.alive:
            if self.one_by_one is not None and moved_views.any_moved(args, kwargs):
                return self.one_by_one(*args, **kwargs)
            moved_views.refuse_moved(self.name, args, kwargs)
            for x in tensors:
                count_write(x)
        assert self.function is not None
        with HookOff():
            return retype(self.function(*args, **kwargs), self.outs)  # type: ignore[arg-type]
