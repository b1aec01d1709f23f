"""Queries: torch functions that compute no tensor but ask a fact about one, such as its storage.

An op without a rule runs on whole tensors, which communicates. A query must not, because a rank may
query alone and would then wait for the others. ``tensor/inspection/answers.py`` answers the queries
that make sense for the logical tensor. All others raise, among them those that future versions of
torch add.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ....rules import table
from ...plans.arguments import collect
from ...plans.shards import is_global

# These return no tensor but read or write every element, so they run whole.
READS = frozenset(("allclose", "equal", "is_nonzero", "apply", "map", "map2"))
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    *OPERATORS,
)


def is_question(name: str, inplace: bool, run: Callable[..., Any]) -> bool:
    """Return whether ``run`` is a function of torch that computes no tensor, such as ``data_ptr``.

    Args:
        name: name of the op, without the underscore of in-place ops.
        inplace: whether the function writes in place.
        run: the function.
    """
    if name in READS or table.find(name) is not None:
        return False
    if not isinstance(run, _OF_TORCH):
        return False
    if isinstance(run, torch._ops.OpOverload):
        return run.namespace == "aten" and not _computes(run._schema)
    if isinstance(run, torch._ops.OpOverloadPacket) and "aten::" not in run._qualified_op_name:
        return False
    return not computes(name + "_" * inplace)


def computes(name: str) -> bool:
    """Return whether torch's operator ``name`` returns or writes tensors, or returns nothing.

    An operator that returns nothing is called for its effect.
    """
    return any(map(_computes, torch._C._jit_get_schemas_for_operator(f"aten::{name}")))


def _computes(schema: Any) -> bool:
    """Return whether an operator with this schema returns or writes tensors, or returns nothing."""
    gives = any("Tensor" in str(value.type) for value in schema.returns)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return gives or writes or not schema.returns


ONE_MEMORY = "its shards lie on several ranks, and torch asks this of one tensor in one memory"


def refusal(name: str, reason: str = ONE_MEMORY, instead: str = "") -> Callable[..., Any]:
    """Return a function that raises when torch's ``name`` is called on a global tensor.

    Args:
        name: name of the function, method or property.
        reason: why it has no result for a global tensor.
        instead: what the message tells the caller to use; by default the shard or the whole value.
    """
    is_property = name.endswith((".__get__", ".__set__", ".__delete__"))
    short = name.rpartition(".")[0] if is_property else name
    asked = short if is_property else f"{short}(...)"
    instead = instead or (
        f"x.to_local().{asked} for this rank's shard, or x.full().{asked} for the whole value"
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        collect((args, kwargs), found)
        spec = next((x._spec for x in found if is_global(x)), "a global tensor")
        raise RuntimeError(f"{short}: x is {spec}; {reason}. Use {instead}.")

    return refuse
