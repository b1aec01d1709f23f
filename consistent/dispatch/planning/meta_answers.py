"""Cache of what runs on ``meta`` tensors have shown, for calls with the same shapes and arguments.

A plan is made for the layouts of one call. But the shapes and dtypes of an op's outputs, and
whether its backward runs on meta tensors, are the same for every layout and placement. So equal
stages of a pipeline, which are on different placements, share one run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch

from ...rules.signature import Call, Operand
from . import autocast

# Types of arguments that may be part of a cache key: ops do the same with equal values. Calls with
# arguments of other types are not cached, so that the cache keeps no such object alive.
_KEY_TYPES = (
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def cached_facts(run: Callable[..., Any], call: Call) -> dict[str, Any]:
    """Return the cached facts about calls like ``call``, as a dict to which the caller adds more.

    The keys are "outs" (shapes and dtypes of the outputs), "backward" (whether backward runs on
    meta tensors) and "refusal" (the error of a CPU's kernels). If the call has arguments of types
    outside ``_KEY_TYPES``, the dict is new and is not cached. ``run`` is torch's function.
    """
    try:
        arguments = _key_of(call.args), _key_of(call.kwargs)
    except _Uncacheable:
        return {}
    tensors = tuple((operand.shape, operand.spec.dtype) for operand in call.operands)
    settings = torch.get_default_dtype(), autocast.autocast_state()
    return _facts_by_key((run, call.inplace, tensors, *arguments, *settings))


@lru_cache(maxsize=4096)
def _facts_by_key(key: Hashable) -> dict[str, Any]:
    return {}


class _Uncacheable(Exception):
    """Raised for an argument of a call whose type cannot be part of a cache key."""


def _key_of(value: Any) -> Hashable:
    """Return a key that is equal for arguments that are equal and of the same types."""
    kind = value.__class__
    if kind is Operand:
        return kind, value.index
    if kind in _KEY_TYPES:
        return kind, value
    if kind in (tuple, list, torch.Size):
        return kind, *map(_key_of, value)
    if kind is dict:
        return kind, *value, *map(_key_of, value.values())
    if kind is slice:
        return kind, *map(_key_of, (value.start, value.stop, value.step))
    raise _Uncacheable
