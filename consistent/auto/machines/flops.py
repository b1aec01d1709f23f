"""Count of the floating-point operations of one call of an aten function: which function is which
product of ``cost_model/flops.py``."""

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
_FORWARD = frozenset(
    """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable""".split()
)
_BACKWARD = frozenset(f"{name}_backward" for name in _FORWARD)
_VARLEN = frozenset(
    """_flash_attention_forward _flash_attention_backward _efficient_attention_forward
    _efficient_attention_backward""".split()
)
ATTENTION = _FORWARD | _BACKWARD | _VARLEN


def _convolution_flops(args: tuple, kwargs: dict, out: Any) -> float:
    x, w = args[0], args[1]
    # Index 6 is ``transposed`` in ``convolution``; in ``mkldnn_convolution`` it is the groups.
    transposed = args[6] if len(args) > 6 and isinstance(args[6], bool) else False
    made = out[0] if isinstance(out, (tuple, list)) else out
    return flops.convolution(x.shape, w.shape, made.shape, transposed)


def _plain_convolution(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of ``cudnn_convolution``, whose arguments differ; it is never transposed."""
    return flops.convolution(args[0].shape, args[1].shape, out.shape, False)


def _convolution_backward(args: tuple, kwargs: dict, out: Any) -> float:
    grad, x, w, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    # The gradients of input and weight cost one product each; the bias has none.
    one = flops.convolution(x.shape, w.shape, grad.shape, transposed)
    return one * sum(map(bool, mask[:2]))


def _attention(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.attention(*(x.shape for x in args[:3]))


def _attention_backward(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.attention_backward(*(x.shape for x in args[1:4]))


def _last_dim(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of a product that sums over the last dim of its first argument.

    Example: [m, k] @ [k, n] gives 2 * m * k * n.
    """
    return flops.contraction(args[0].shape, -1, out.shape)


def _added(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.contraction(args[1].shape, -1, out.shape)


def _outer(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.outer(out.shape)


def _grouped(args: tuple, kwargs: dict, out: Any) -> float:
    return flops.grouped(args[0].shape, args[1].shape)


_OWN: dict[str, Callable[[tuple, dict, Any], float]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution_flops),
    "cudnn_convolution": _plain_convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_FORWARD, _attention),
    **dict.fromkeys(_BACKWARD, _attention_backward),
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "addmv": _added,
    "addr": _outer,
    "dot": _last_dim,
    "linear": _last_dim,
    "matmul": _last_dim,
    "mkldnn_linear": _last_dim,
    "_mkl_linear": _last_dim,
    "mv": _last_dim,
    "vdot": _last_dim,
}


def _own(func: torch._ops.OpOverload) -> Callable[[tuple, dict, Any], float] | None:
    name = func._schema.name.partition("::")[2]
    return _OWN.get(name) or (_OWN.get(name[:-1]) if name.endswith("_") else None)


def is_product(func: torch._ops.OpOverload) -> bool:
    """Return whether the op multiplies matrices or vectors."""
    return _own(func) is not None or _formula(func) is not None


def _formula(func: torch._ops.OpOverload) -> Callable | None:
    packet = func.overloadpacket
    found = flop_registry.get(packet)
    if found is None and packet.__name__.endswith("_") and func.namespace == "aten":  # like addmm_
        found = flop_registry.get(getattr(torch.ops.aten, packet.__name__[:-1], None))
    return found


def flops_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> float:
    """Return the multiplications and additions of the matrix products in one call of ``func``.

    They are computed from shapes alone. For ops that multiply no matrices or vectors, 0.

    Args:
        args, kwargs, out: arguments and result of the call.
    """
    own = _own(func)
    if own is not None:
        return own(args, kwargs, out)
    formula = _formula(func)
    if formula is None:
        return 0.0
    return formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out)
