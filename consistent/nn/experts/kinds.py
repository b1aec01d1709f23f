"""Recognize modules that are stacks of experts, and those that take routed tokens."""

from __future__ import annotations

import inspect
import re

from torch import nn

COUNT_ATTRIBUTES = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
"""Names of attributes that hold the number of experts of a module."""

_INDEX = re.compile(r"ind(ex|ices)|selected_experts", re.IGNORECASE)
_WEIGHTS = re.compile(r"weights", re.IGNORECASE)


def expert_count(part: nn.Module) -> int | None:
    """Return the number of experts of ``part``; None if it has none.

    Read from an attribute in ``COUNT_ATTRIBUTES``, otherwise from the first parameter with three
    dims.
    """
    for name in COUNT_ATTRIBUTES:
        value = getattr(part, name, None)
        if isinstance(value, int):
            return value
    weights = [p for p in part._parameters.values() if p is not None and p.ndim == 3]
    return weights[0].shape[0] if weights else None


def takes_routed_tokens(part: nn.Module) -> bool:
    """Return whether ``part`` is a module of experts that takes tokens with their routing.

    Its ``forward(tokens, index, weights)`` returns for each token the sum over the experts in
    ``index`` of their results times ``weights``, and all of its tensors are stacks with one entry
    for each expert. The test goes by the names of the arguments, which the experts of transformers'
    mixtures have.
    """
    try:
        names = list(inspect.signature(part.forward).parameters)
    except ValueError:  # the forward of a scripted module has no signature
        return False
    if len(names) < 3 or not _INDEX.search(names[1]) or not _WEIGHTS.search(names[2]):
        return False
    own_params = [p for p in part._parameters.values() if p is not None]
    inside = [*part.parameters(), *part.buffers()]
    count = expert_count(part)
    return (
        bool(own_params)
        and len(inside) == len(own_params)
        and all(_is_expert_stack(p.shape, count) for p in own_params)
    )


def _is_expert_stack(shape: tuple[int, ...], count: int | None) -> bool:
    """Return whether a tensor of ``shape`` has ``count`` entries along dim 0, one per expert."""
    return len(shape) > 1 and shape[0] == count
