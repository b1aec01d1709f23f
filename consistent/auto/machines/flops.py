"""Floating-point operations of one call of an aten function, by ``cost_model/flops.py`` or torch's
flop counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...cost_model import flops

CONVOLUTIONS = frozenset(
    """convolution _convolution cudnn_convolution convolution_overrideable _slow_conv2d_forward
    convolution_backward mkldnn_convolution""".split()
)
_ATTENTION_FORWARD = frozenset(
    """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable""".split()
)
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _ATTENTION_FORWARD)
_ATTENTION_VARLEN = frozenset(
    """_flash_attention_forward _flash_attention_backward _efficient_attention_forward
    _efficient_attention_backward""".split()
)
ATTENTION = _ATTENTION_FORWARD | _ATTENTION_BACKWARD | _ATTENTION_VARLEN


def _convolution_flops(args: tuple, kwargs: dict, out: Any) -> float:
    x, w = args[0], args[1]
    # Index 6 is ``transposed`` in ``convolution``; in ``mkldnn_convolution`` it is the groups.
    transposed = args[6] if len(args) > 6 and isinstance(args[6], bool) else False
    result = out[0] if isinstance(out, (tuple, list)) else out
    return flops.convolution(x.shape, w.shape, result.shape, transposed)


def _cudnn_convolution_flops(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of ``cudnn_convolution``, whose arguments differ; it is never transposed."""
    return flops.convolution(args[0].shape, args[1].shape, out.shape, False)


def _convolution_backward_flops(args: tuple, kwargs: dict, out: Any) -> float:
    grad, x, w, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    # The gradients of input and weight cost one convolution each; that of the bias is not counted.
    product_flops = flops.convolution(x.shape, w.shape, grad.shape, transposed)
    return product_flops * sum(map(bool, mask[:2]))


def _attention_flops(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.attention(*(x.shape for x in args[:3]))


def _attention_backward_flops(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.attention_backward(*(x.shape for x in args[1:4]))


def _last_dim_flops(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of a matmul that sums over the last dim of its first argument.

    Example: [m, k] @ [k, n] gives 2 * m * k * n.
    """
    return flops.contraction(args[0].shape, -1, out.shape)


def _addmv_flops(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.contraction(args[1].shape, -1, out.shape)


def _outer_flops(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.outer(out.shape)


def _grouped_flops(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.grouped_matmul(args[0].shape, args[1].shape)


_OWN_FORMULAS: dict[str, Callable[[tuple, dict, Any], float]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution_flops),
    "cudnn_convolution": _cudnn_convolution_flops,
    "convolution_backward": _convolution_backward_flops,
    **dict.fromkeys(_ATTENTION_FORWARD, _attention_flops),
    **dict.fromkeys(_ATTENTION_BACKWARD, _attention_backward_flops),
    "_grouped_mm": _grouped_flops,
    "grouped_mm": _grouped_flops,
    "_scaled_grouped_mm": _grouped_flops,
    "addmv": _addmv_flops,
    "addr": _outer_flops,
    "dot": _last_dim_flops,
    "linear": _last_dim_flops,
    "matmul": _last_dim_flops,
    "mkldnn_linear": _last_dim_flops,
    "_mkl_linear": _last_dim_flops,
    "mv": _last_dim_flops,
    "vdot": _last_dim_flops,
}


def _own_formula(func: torch._ops.OpOverload) -> Callable[[tuple, dict, Any], float] | None:
    name = func._schema.name.partition("::")[2]
    return _OWN_FORMULAS.get(name) or (_OWN_FORMULAS.get(name[:-1]) if name.endswith("_") else None)


def is_product(func: torch._ops.OpOverload) -> bool:
    """Return whether the op is a matmul, a convolution or attention."""
    return _own_formula(func) is not None or _torch_formula(func) is not None


def _torch_formula(func: torch._ops.OpOverload) -> Callable | None:
    packet = func.overloadpacket
    formula = flop_registry.get(packet)
    # An in-place op such as addmm_ has the formula of addmm.
    if formula is None and packet.__name__.endswith("_") and func.namespace == "aten":
        formula = flop_registry.get(getattr(torch.ops.aten, packet.__name__[:-1], None))
    return formula


def flops_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> float:
    """Return the floating-point operations of the matmuls in one call of ``func``.

    Convolutions and attention count as matmuls. Only shapes are used. 0 for other ops.

    Args:
        args, kwargs, out: arguments and result of the call.
    """
    own = _own_formula(func)
    if own is not None:
        return own(args, kwargs, out)
    formula = _torch_formula(func)
    if formula is None:
        return 0.0
    return formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out)
