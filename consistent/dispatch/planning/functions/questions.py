"""Queries: torch functions that compute no tensor but read a fact about one, such as its storage.

An op without a rule runs on whole tensors, which communicates. A query must not, because one rank
may query by itself and would then wait for others. ``tensor/inspection/answers.py`` answers the
queries that make sense for the logical tensor. All others raise, among them those that future
versions of torch add.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ....rules import table
from ...plans.arguments import collect
from ...plans.shards import is_global

# These return no tensor but read or write every element, so they run on gathered tensors.
VALUE_READING_OPS = frozenset(("allclose", "equal", "is_nonzero", "apply", "map", "map2"))
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCH_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    *OPERATORS,
)


def is_query(name: str, inplace: bool, run: Callable[..., Any]) -> bool:
    """Return whether ``run`` is a function of torch that computes no tensor, such as ``data_ptr``.

    Args:
        name: name of the op, without the underscore of in-place ops.
        inplace: whether the function writes in place.
        run: the function.
    """
    if name in VALUE_READING_OPS or table.find_row(name) is not None:
        return False
    if not isinstance(run, _TORCH_TYPES):
        return False
    if isinstance(run, torch._ops.OpOverload):
        return run.namespace == "aten" and not _schema_computes(run._schema)
    if isinstance(run, torch._ops.OpOverloadPacket) and "aten::" not in run._qualified_op_name:
        return False
    return not computes_tensors(name + "_" * inplace)


def computes_tensors(name: str) -> bool:
    """Return whether torch's operator ``name`` returns or writes tensors, or returns nothing.

    An operator that returns nothing is called for its effect.
    """
    return any(map(_schema_computes, torch._C._jit_get_schemas_for_operator(f"aten::{name}")))


def _schema_computes(schema: Any) -> bool:
    """Return whether an operator with this schema returns or writes tensors, or returns nothing."""
    returns_tensor = any("Tensor" in str(value.type) for value in schema.returns)
    writes_tensor = any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )
    return returns_tensor or writes_tensor or not schema.returns


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
    expression = short if is_property else f"{short}(...)"
    instead = instead or (
        f"x.to_local().{expression} for this rank's shard, "
        f"or x.full().{expression} for the whole value"
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        collect((args, kwargs), tensors)
        spec = next((x._spec for x in tensors if is_global(x)), "a global tensor")
        raise RuntimeError(f"{short}: x is {spec}; {reason}. Use {instead}.")

    return refuse
