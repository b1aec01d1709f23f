"""Count of the floating-point operations of one op call: the multiplications and additions of its
matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

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


def _convolution(x: Tensor, w: Tensor, out: Tensor, transposed: bool) -> float:
    """Return the flops of a convolution.

    ``w`` is [out, in / groups, ...], or [in, out / groups, ...] if transposed. Each element of the
    output (of the input, if transposed) is multiplied with one slice of ``w``.
    """
    return 2.0 * (x if transposed else out).numel() * math.prod(w.shape[1:])


def _convolution_flops(args: tuple, kwargs: dict, out: Any) -> float:
    x, w = args[0], args[1]
    # Index 6 is ``transposed`` in ``convolution``; in ``mkldnn_convolution`` it is the groups.
    transposed = args[6] if len(args) > 6 and isinstance(args[6], bool) else False
    return _convolution(x, w, out[0] if isinstance(out, (tuple, list)) else out, transposed)


def _plain_convolution(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of cudnn_convolution, which has other arguments, and is not transposed."""
    return _convolution(args[0], args[1], out, False)


def _convolution_backward(args: tuple, kwargs: dict, out: Any) -> float:
    grad, x, w, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    # The gradients of input and weight cost one product each; the bias has none.
    return _convolution(x, w, grad, transposed) * sum(map(bool, mask[:2]))


def _attention(args: tuple, kwargs: dict, out: Any) -> float:
    return sdpa_flop_count(*(x.shape for x in args[:3]))


def _attention_backward(args: tuple, kwargs: dict, out: Any) -> float:
    return sdpa_backward_flop_count(*(x.shape for x in args[:4]))


def _vectors(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of mv, dot and vdot, where each element of the first operand counts once."""
    return 2.0 * args[0].numel()


def _added_vectors(args: tuple, kwargs: dict, out: Any) -> float:
    return 2.0 * args[1].numel()


def _last_dim(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of linear and matmul, which contract the last dim of the first operand."""
    return 2.0 * out.numel() * args[0].shape[-1]


def _outer(args: tuple, kwargs: dict, out: Any) -> float:
    return 2.0 * out.numel()


def _grouped(args: tuple, kwargs: dict, out: Any) -> float:
    """Return the flops of a grouped matrix product.

    If rows [m, k] are multiplied with [groups, k, n], each row is multiplied with one of the
    matrices. If [k, m] is multiplied with [k, n], both cut into groups along k, all groups together
    cost as much as one product.
    """
    x, w = args[0], args[1]
    return 2.0 * math.prod(x.shape) * w.shape[-1]


_OWN: dict[str, Callable[[tuple, dict, Any], float]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution_flops),
    "cudnn_convolution": _plain_convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_FORWARD, _attention),
    **dict.fromkeys(_BACKWARD, _attention_backward),
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "addmv": _added_vectors,
    "addr": _outer,
    "dot": _vectors,
    "linear": _last_dim,
    "matmul": _last_dim,
    "mkldnn_linear": _last_dim,
    "_mkl_linear": _last_dim,
    "mv": _vectors,
    "vdot": _vectors,
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
    """Return the multiplications and additions of the matrix products in one call; 0 if there are
    none."""
    own = _own(func)
    if own is not None:
        return own(args, kwargs, out)
    formula = _formula(func)
    if formula is None:
        return 0.0
    return formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out)
