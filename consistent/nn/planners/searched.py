"""Find the plan for ``plan="auto"`` on one rank, for all ranks."""

from __future__ import annotations

from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ...movement.world import my_coordinate
from ...spec import Placement
from ..plan import Plan
from .layout_search import best_plan


def resolve_auto(
    module: torch.nn.Module, placement: Placement, plan: Any, example: Any, memory: int | None
) -> Any:
    """Return ``plan``, or the plan that the search finds if it is "auto".

    Only the first rank of the placement searches, since each rank may have another batch as its
    example. The others receive the plan in one small collective.

    Args:
        module: the module to plan for.
        placement: its placement.
        plan: the ``plan`` argument of ``parallelize``.
        example: a batch, on which the search follows the module's ops.
        memory: the bytes that a rank may hold; None for no limit.

    Raises:
        ValueError: "auto" has no example, or another plan has one or a ``memory``. Errors of the
            search are raised on all ranks.
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
    if placement.size == 1 or my_coordinate(placement) is None:
        return best_plan(module, placement, example, memory)
    result: Plan | Exception | None = None
    own_error: Exception | None = None
    if current().rank == placement.first_rank:
        try:
            result = best_plan(module, placement, example, memory)
        except Exception as error:  # sent to the other ranks, which raise it, too
            own_error, result = error, _as_picklable(error)
    result = gather_from_ranks(result, tuple(placement.ranks.ravel().tolist()))[0]
    if own_error is not None:
        raise own_error
    if isinstance(result, Exception):
        raise result
    return result


def _as_picklable(error: Exception) -> Exception:
    """Return ``error`` in a form that other ranks can unpickle: of a builtin class.

    The constructor of another library's exception may need more than the message.
    """
    if type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
