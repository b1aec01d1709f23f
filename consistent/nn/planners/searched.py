"""``plan="auto"``: the plan that a search finds. The search stands on all that is here, so it lies
above and is entered when the package is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirrored.every_rank import gathered
from mirrored.transports.default import current

from ...movement.world import my_coordinate
from ...spec import Placement
from ..plan import Plan

Search = Callable[[torch.nn.Module, Placement, Any, int | None], Plan]

_search: Search | None = None


def use_search(search: Search) -> None:
    """From now on ``plan="auto"`` is what ``search(module, placement, example, memory)`` finds."""
    global _search
    _search = search


def searched(
    module: torch.nn.Module, placement: Placement, plan: Any, example: Any, memory: int | None
) -> Any:
    """``plan``, or what is found where it is "auto". The first rank of the placement searches for
    all of them, as each may have a batch of its own as an example: one small collective.

    Raises:
        ValueError: "auto" has no example, or another plan has one; or, on all ranks, what the
            search says.
    """
    if not isinstance(plan, str) or plan != "auto":
        if example is not None or memory is not None:
            raise ValueError(
                f"parallelize: example= and memory= are what a plan is searched by, and plan is "
                f'{plan!r}. Write plan="auto", or leave them out.'
            )
        return plan
    if example is None:
        raise ValueError(
            'parallelize: plan="auto" follows the module on a batch, and there is none. Give '
            "example=batch: a tensor, a tuple of arguments, or a mapping of keywords; its sizes "
            "count, so one on `meta` serves as well."
        )
    assert _search is not None, "consistent/__init__.py enters it"
    if placement.size == 1 or my_coordinate(placement) is None:
        return _search(module, placement, example, memory)
    found: Plan | Exception | None = None
    failed: Exception | None = None
    if current().rank == placement.first_rank:
        try:
            found = _search(module, placement, example, memory)
        except Exception as error:  # every rank is to raise it
            failed, found = error, _as_sent(error)
    found = gathered(found, tuple(placement.ranks.ravel().tolist()))[0]
    if failed is not None:
        raise failed
    if isinstance(found, Exception):
        raise found
    return found


def _as_sent(error: Exception) -> Exception:
    """An error that can be made again elsewhere: those of other libraries may need more than what
    they say."""
    if type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
