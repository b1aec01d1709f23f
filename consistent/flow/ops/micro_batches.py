"""Micro-batches, and the decorator of all ops, which chooses the placement where an op runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...spec import B, Placement, S
from ...tensor.global_tensor import GlobalTensor
from .. import session
from ..scope import current_placement


class MicroBatches(list):
    """List of the parts of a batch, as ``unpack`` returns it.

    Ops of ``consistent.flow`` run on one part after the other, and return such a list.
    """


def unpack(x: Any, count: int) -> MicroBatches:
    """Cut ``x`` into ``count`` micro-batches along dim 0; ``pack`` joins them again."""
    if x.shape[0] % count:
        raise ValueError(
            f"unpack: dim 0 of x is {x.shape[0]}, and {count} micro-batches are asked for.\n"
            "  Micro-batches are of one size.\n"
            f"  Choose a number that divides {x.shape[0]}."
        )
    return MicroBatches(torch.chunk(x, count))


def pack(parts: MicroBatches, count: int) -> Any:
    """Join ``count`` micro-batches to the whole batch."""
    if len(parts) != count:
        raise ValueError(
            f"pack: there are {len(parts)} micro-batches, and {count} are asked for.\n"
            "  pack undoes unpack.\n"
            f"  Give {len(parts)}."
        )
    return torch.cat(parts)


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that makes a function an op of ``consistent.flow``.

    The op first moves its tensors to one placement. If arguments are ``MicroBatches``, it runs once
    for each micro-batch, and returns ``MicroBatches``.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        counts = {len(a) for a in (*args, *kwargs.values()) if isinstance(a, MicroBatches)}
        if len(counts) > 1:
            raise ValueError(
                f"{function.__name__}: its arguments are {sorted(counts)} micro-batches.\n"
                "  The k-th ones belong together.\n"
                "  Unpack all of them into the same number."
            )
        for count in counts:
            return MicroBatches(
                run(*_micro_batch(args, k), **_micro_batch(kwargs, k)) for k in range(count)
            )
        target = _op_placement([*args, *kwargs.values()])
        if target is None:
            return function(*args, **kwargs)
        moved = {name: move_to(value, target) for name, value in kwargs.items()}
        return function(*(move_to(value, target) for value in args), **moved)

    return run


def move_to(x: Any, placement: Placement) -> Any:
    """Return a global tensor ``x`` moved to ``placement``.

    Over several devices it is split along dim 0; a tensor without dims, or on one device, is
    replicated. Other values, and tensors that are on ``placement`` already, are returned as they
    are.
    """
    if not isinstance(x, GlobalTensor) or x.placement == placement:
        return x
    entry = S(0) if x.ndim and placement.size > 1 else B
    return x.to_global(placement=placement, sbp=(entry,) * placement.ndim)


def _micro_batch(values: Any, k: int) -> Any:
    if isinstance(values, dict):
        return dict(zip(values, _micro_batch(tuple(values.values()), k)))
    return tuple(v[k] if isinstance(v, MicroBatches) else v for v in values)


def _op_placement(values: list[Any]) -> Placement | None:
    """Return the placement on which an op with the arguments ``values`` runs.

    The innermost entered scope decides. Without a scope the op runs on the placement of its
    arguments, or, if they have several placements, on that of the job. Returns None if no argument
    is a global tensor.
    """
    placements = {v.placement for v in values if isinstance(v, GlobalTensor)}
    if not placements:
        return None
    return current_placement() or (
        placements.pop() if len(placements) == 1 else session.current_or_default_placement()
    )
