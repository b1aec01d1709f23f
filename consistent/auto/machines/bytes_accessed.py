"""Estimate of the bytes of memory that one op call reads and writes, from its schema and the sizes
of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from .op_signature import Many, OpSignature, tensors_of

# Ops that copy nothing, although their schemas do not mark the results as aliases.
VIEWS = frozenset("_unsafe_view _reshape_alias lift_fresh detach_ t_ set_ unsafe_split".split())
# Ops that allocate memory and do not write it.
ALLOCATES = frozenset(
    """empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_""".split()
)
# Ops that do not read the old values of the tensors that they write.
_ONLY_WRITES = frozenset(
    """fill_ zero_ copy_ _foreach_copy_ _foreach_zero_ uniform_ normal_ bernoulli_ random_
    exponential_ geometric_ cauchy_ log_normal_ randperm_ arange""".split()
)
# Ops that only use the shape and dtype of their first tensor, without reading it.
_ONLY_SHAPES = frozenset(
    """zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_full""".split()
)
# Ops that read as many elements of their first tensor as they return.
_READ_ROWS = frozenset(
    "embedding index index_select gather take _unsafe_index take_along_dim".split()
)
# Ops that write some rows of their first tensor: op -> name of the argument with the new rows.
_WRITE_ROWS = {
    "index_put_": "values",
    "_index_put_impl_": "values",
    "_unsafe_index_put_": "values",
    "index_add_": "source",
    "index_copy_": "source",
    "scatter_": "src",
    "scatter_add_": "src",
    "scatter_reduce_": "src",
}
# Arguments that the schema marks as written, but which are only written if a gradient scale is
# passed, as the ``grads`` of ``_fused_adam_``.
_NOT_WRITTEN = frozenset(["grads"])


def touched_bytes(func: torch._ops.OpOverload, call: OpSignature) -> int:
    """Return the bytes that a call of the op ``func`` reads plus those that it writes.

    A tensor that is updated in place counts twice. For example, ``a + b`` on float32 tensors of 100
    elements gives 3 * 400.
    """
    name = func._schema.name.partition("::")[2]
    indexing_bytes = _indexing_bytes(func, name, call)
    if indexing_bytes is not None:
        return indexing_bytes
    total = 0
    for info, value in _arguments(func, call):
        size = sum(x.nbytes for x in tensors_of(value))
        written = info.alias_info is not None and info.alias_info.is_write
        reads = not (info.is_out or (written and name in _ONLY_WRITES) or name in _ONLY_SHAPES)
        total += size * (reads + (written and info.name not in _NOT_WRITTEN))
    return total + _new_bytes(func, call)


def _new_bytes(func: torch._ops.OpOverload, call: OpSignature) -> int:
    """Return the bytes of the results that are new tensors, and not aliases of arguments."""
    returns = func._schema.returns
    outs = call.out.items if isinstance(call.out, Many) and len(returns) > 1 else (call.out,)
    return sum(
        x.nbytes
        for info, out in zip(returns, outs)
        if info.alias_info is None
        for x in tensors_of(out)
    )


def _indexing_bytes(func: torch._ops.OpOverload, name: str, call: OpSignature) -> int | None:
    """Return the bytes that an indexing op touches; it uses only some rows of its first tensor.

    Return None for other ops, which touch their whole tensors.
    """
    if name in _READ_ROWS:
        out_bytes = sum(x.nbytes for x in tensors_of(call.out))
        # The rows are read once and written once; all other arguments are read.
        return 2 * out_bytes + _bytes_after_first(func, call)
    if name in _WRITE_ROWS:
        arguments = dict((info.name, value) for info, value in _arguments(func, call))
        row_bytes = sum(x.nbytes for x in tensors_of(arguments.get(_WRITE_ROWS[name])))
        return _bytes_after_first(func, call) + row_bytes * (1 + _adds_rows(name, arguments))
    if name == "embedding_dense_backward":  # zeros, and then rows are added to some of them
        grad = tensors_of(call.args[0])
        return sum(x.nbytes for x in (*grad, *grad, *tensors_of(call.args), *tensors_of(call.out)))
    return None


def _adds_rows(name: str, arguments: dict[str, Any]) -> bool:
    """Return whether an indexing op adds to the rows that it writes, and so reads them as well.

    ``arguments`` has the arguments of the call by name.
    """
    accumulate = arguments.get("accumulate")
    return "add" in name or "reduce" in name or bool(accumulate is not None and accumulate.value)


def _bytes_after_first(func: torch._ops.OpOverload, call: OpSignature) -> int:
    values = [value for _, value in _arguments(func, call)]
    return sum(x.nbytes for x in tensors_of(tuple(values[1:])))


def _arguments(func: torch._ops.OpOverload, call: OpSignature) -> Iterator[tuple[Any, Any]]:
    """Yield (entry in the op's schema, description of the value) for each argument of the call."""
    infos = _schema_arguments(func)
    by_name = {info.name: info for info in infos}
    yield from zip(infos, call.args)
    for name, value in call.kwargs:
        if name in by_name:
            yield by_name[name], value


@lru_cache(None)
def _schema_arguments(func: torch._ops.OpOverload) -> tuple[Any, ...]:
    return tuple(func._schema.arguments)
