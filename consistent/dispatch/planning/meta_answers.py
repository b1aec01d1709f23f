"""Answers of runs on ``meta`` tensors, kept for calls that differ in layouts or placements alone.

A plan is made for the layouts of one call. The shapes and dtypes of an op's outputs, and whether
its backward runs on meta tensors, are the same for every layout and placement, so of the stages of
a pipeline one asks torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch

from ...rules.signature import Call, Operand
from . import autocast

# Types of arguments that are equal only if ops do the same with them. Objects of other types are
# not held longer than their call.
_PLAIN = (
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def kept_answers(run: Callable[..., Any], call: Call) -> dict[str, Any]:
    """Return the answers about ``call`` by their names, in a dict that takes further ones.

    The dict is empty and is not kept if the call has arguments of other kinds than torch's own.
    """
    try:
        arguments = _key_of(call.args), _key_of(call.kwargs)
    except _Other:
        return {}
    tensors = tuple((operand.shape, operand.spec.dtype) for operand in call.operands)
    settings = torch.get_default_dtype(), autocast.now()
    return _kept((run, call.inplace, tensors, *arguments, *settings))


@lru_cache(maxsize=4096)
def _kept(key: Hashable) -> dict[str, Any]:
    return {}


class _Other(Exception):
    """An argument of a call has a type of which no key is made."""


def _key_of(value: Any) -> Hashable:
    """Return a key that is equal for arguments that are equal and of the same types."""
    kind = value.__class__
    if kind is Operand:
        return kind, value.index
    if kind in _PLAIN:
        return kind, value
    if kind in (tuple, list, torch.Size):
        return kind, *map(_key_of, value)
    if kind is dict:
        return kind, *value, *map(_key_of, value.values())
    if kind is slice:
        return kind, *map(_key_of, (value.start, value.stop, value.step))
    raise _Other
