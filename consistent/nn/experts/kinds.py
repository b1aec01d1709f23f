"""Which modules are stacks of experts, and which of these take tokens that were routed."""

from __future__ import annotations

import inspect
import re

from torch import nn

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
"""Attributes that say how many experts a module has."""

_INDEX = re.compile(r"ind(ex|ices)|selected_experts", re.IGNORECASE)
_WEIGHTS = re.compile(r"weights", re.IGNORECASE)


def count_of(part: nn.Module) -> int | None:
    """How many experts ``part`` says that it has, or its first weight of three dims has."""
    for name in COUNTS:
        value = getattr(part, name, None)
        if isinstance(value, int):
            return value
    weights = [p for p in part._parameters.values() if p is not None and p.ndim == 3]
    return weights[0].shape[0] if weights else None


def takes_routed(part: nn.Module) -> bool:
    """Whether ``forward(tokens, index, weights)`` of ``part`` is the sum over each token's experts,
    which ``index`` names, of what they make of it, times ``weights``; and all of its tensors are
    stacks of its experts'.

    So are the experts of transformers' mixtures, whose arguments have such names.
    """
    try:
        names = list(inspect.signature(part.forward).parameters)
    except ValueError:  # a scripted module's has none
        return False
    if len(names) < 3 or not _INDEX.search(names[1]) or not _WEIGHTS.search(names[2]):
        return False
    own = [p for p in part._parameters.values() if p is not None]
    inside = [*part.parameters(), *part.buffers()]
    count = count_of(part)
    return bool(own) and len(inside) == len(own) and all(_is_stack(p.shape, count) for p in own)


def _is_stack(shape: tuple[int, ...], count: int | None) -> bool:
    return len(shape) > 1 and shape[0] == count
