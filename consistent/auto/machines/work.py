"""The ``Work`` of a call of an aten function: the flops of its matmuls, and the memory that it
reads and writes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...cost_model.work import Work
from .bytes_accessed import ALLOCATES, VIEWS, touched_bytes
from .flops import ATTENTION, CONVOLUTIONS, flops_of, is_product
from .op_signature import Like, OpSignature, describe_call, tensors_of

_COPIES = frozenset(
    """clone copy_ _to_copy cat stack index index_select gather embedding _foreach_copy_ new_full
    fill_ zero_ full zeros ones zeros_like ones_like full_like slice_backward select_backward
    constant_pad_nd _local_scalar_dense contiguous repeat roll flip index_put_ index_put scatter
    scatter_ slice_scatter select_scatter _foreach_zero_ _unsafe_index""".split()
)
_REDUCTIONS = frozenset(
    """sum mean amax amin max min argmax argmin any all prod var var_mean std norm
    linalg_vector_norm logsumexp _softmax _log_softmax _softmax_backward_data _safe_softmax
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm _native_batch_norm_legit
    native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward nll_loss_forward
    nll_loss_backward cumsum topk sort _foreach_norm""".split()
)


_works: dict[OpSignature, Work] = {}
MAX_CACHED = 100_000


def work_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> Work:
    """Return the flops and memory traffic (``Work``) of a call that has been made, by shapes alone.

    The tensors may be on ``meta``.

    Args:
        func: the op, as passed to a ``TorchDispatchMode``.
        args, kwargs: arguments of the call.
        out: result of the call.
    """
    key = describe_call(_op_name(func), args, kwargs, out)
    work = _works.get(key)
    if work is None:
        if len(_works) >= MAX_CACHED:
            _works.clear()
        work = _works[key] = _new_work(func, args, kwargs, out, key)
    return work


def _new_work(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict, out: Any, key: OpSignature
) -> Work:
    kind = kind_of(func)
    call_tensors = tensors_of(key) or tensors_of((key.out,))
    largest = max(call_tensors, key=_dtype_priority, default=None)
    dtype = largest.dtype if largest is not None else torch.float32
    if kind == "view":
        return Work(key.op, kind, dtype, 0.0, 0, key)
    flops = float(flops_of(func, args, kwargs, out))
    return Work(key.op, kind, dtype, flops, touched_bytes(func, key), key)


def _dtype_priority(x: Like) -> tuple[bool, int]:
    """Return a sort key whose maximum is the tensor that decides the dtype of an op's ``Work``.

    That is the largest float tensor. Integers and masks come last, because they do not decide how
    fast an op computes.
    """
    return x.dtype.is_floating_point or x.dtype.is_complex, x.nbytes


@lru_cache(None)
def _op_name(func: torch._ops.OpOverload) -> str:
    return str(func)


@lru_cache(None)
def _packet_name(func: torch._ops.OpOverload) -> str:
    return func._schema.name.partition("::")[2]


@lru_cache(None)
def kind_of(func: torch._ops.OpOverload) -> str:
    """Return the kind of an op, such as "matmul" or "pointwise", from its schema, tags and name.

    The kinds are those of ``Work``.
    """
    name = _packet_name(func)
    if func.namespace == "profiler" or name in VIEWS or name in ALLOCATES or _is_view(func):
        return "view"
    if name in CONVOLUTIONS:
        return "convolution"
    if name in ATTENTION:
        return "attention"
    if is_product(func):
        return "matmul"
    if name in _COPIES:
        return "copy"
    if name in _REDUCTIONS or getattr(torch.Tag, "reduction", None) in func.tags:
        return "reduction"
    if torch.Tag.pointwise in func.tags or name.startswith(("_foreach", "_fused_adam", "_fused_s")):
        return "pointwise"
    return "other"


def _is_view(func: torch._ops.OpOverload) -> bool:
    """Return whether the op only makes views: each result aliases an argument.

    An op that modifies an argument in place, and returns it, is no view.
    """
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
