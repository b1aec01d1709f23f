"""Ops under torch's autocast: the dtype in which torch computes each op.

Torch casts the operands where the op runs, so for ops that run on shards torch's own casts are
enough. But autocast does not reach forms (this library's own implementations of ops, ``forms/``),
and a run on meta tensors does not show the cast. In these cases the operands are cast first, as
torch would cast them, and the op then runs with autocast off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ...rules.signature import Call
from ..plans.arguments import tensors_of, with_tensors

# Ops that torch runs in the lower precision (_LOWER) and ops that it runs in the widest dtype of
# their operands (_WIDEST). All other ops on torch's autocast lists compute in float32.
_LOWER = frozenset(
    """
    _addmm_activation _convolution _native_multi_head_attention
    _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm
    addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose
    einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mkldnn_rnn_layer mm
    mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """.split()
)
_WIDEST = {
    "cpu": frozenset("cat index_copy stack".split()),
    "cuda": frozenset(
        """addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot
        vdot""".split()
    ),
}
# Ops that torch composes of ops on its autocast lists -> the listed op that decides the output's
# dtype.
DECIDING_OP = {
    "chain_matmul": "mm",
    "cross_entropy_loss": "nll_loss",
    "einsum": "bmm",
    "linalg_multi_dot": "mm",
    "linalg_norm": "linalg_vector_norm",
    "nll_loss_nd": "nll_loss",
    "tensordot": "mm",
}
_BANNED = {"cuda": frozenset(["binary_cross_entropy"])}  # torch raises
_DISPATCH_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@lru_cache
def autocast_ops(device: str) -> frozenset[str]:
    """Return the names of the ops on the installed torch's autocast lists for ``device``."""
    registrations = getattr(torch._C, "_dispatch_get_registrations_for_dispatch_key", None)
    if registrations is None or device not in _DISPATCH_KEYS:
        return frozenset()
    pairs = [
        name.removeprefix("aten::").split(".") for name in registrations(_DISPATCH_KEYS[device])
    ]
    names = {name for name, *overload in pairs if overload != ["deprecated"]}
    return frozenset(names - _BANNED.get(device, frozenset()))


def is_on(device: str) -> bool:
    """Return whether autocast is on for tensors of the device type ``device``."""
    return device in _DISPATCH_KEYS and torch.is_autocast_enabled(device)


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return the state of autocast as (device type, whether it is on, its dtype) per device type.

    On a machine without CUDA: ``(("cpu", False, torch.bfloat16),)``.
    """
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def dtype_of(call: Call, device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts the operands of ``call`` to, or None if it does not."""
    name = call.name if call.name in autocast_ops(device) else DECIDING_OP.get(call.name, "")
    if call.name == "einsum" and len(call.operands) == 1:
        return None  # with one operand einsum multiplies nothing, so it calls no bmm
    if name not in autocast_ops(device) or call.inplace or call.kwargs.get("dtype") is not None:
        return None
    dtypes = [x.spec.dtype for x in call.operands if is_cast(x.spec.dtype)]
    if name in _WIDEST[device]:
        target = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(device)
    else:
        target = torch.get_autocast_dtype(device) if name in _LOWER else torch.float32
    return target if any(dtype is not target for dtype in dtypes) else None


def is_cast(dtype: torch.dtype) -> bool:
    """Return whether autocast casts tensors of ``dtype``: float64 and integers stay as they are."""
    return dtype.is_floating_point and dtype is not torch.float64


def cast_first(
    run: Callable[..., Any], device: str, dtype: torch.dtype | None
) -> Callable[..., Any]:
    """Wrap ``run`` to cast its tensors to ``dtype`` and then run with autocast off.

    Tensors that autocast would not cast (integers, float64) stay as they are. If ``dtype`` is None,
    nothing is cast.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # The state is not saved first: this wrapper is made only while autocast is on, so it is on
        # before and after.
        torch.set_autocast_enabled(device, False)
        try:
            cast_tensors = _cast(tensors_of(args, kwargs), dtype)
            args, kwargs = with_tensors(args, kwargs, cast_tensors)
            return run(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    return call


def _cast(tensors: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    return [x.to(dtype) if dtype is not None and is_cast(x.dtype) else x for x in tensors]
