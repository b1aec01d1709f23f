"""Torch's fused attention kernels that return and accept the log-sum-exp of each row.

Forward returns it. Backward accepts the log-sum-exp over all keys, so one block of keys can be
differentiated by itself. There is one kernel for the CPU, and for GPUs FlashAttention and the
memory-efficient kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

_aten = torch.ops.aten
_LOG_ALIGNMENT = 32  # the memory-efficient kernel pads the log-sum-exp to a multiple of this


class Mask(NamedTuple):
    """Scale and mask of a block of scores.

    Args:
        scale: factor of the scores.
        triangle: whether row i attends to the keys 0 to i only.
        bias: added to the scaled scores, or None.
    """

    scale: float
    triangle: bool
    bias: Tensor | None


class Kernel(NamedTuple):
    """Forward and backward function of one attention kernel.

    ``forward(query, key, value, mask)`` returns the result and each row's log-sum-exp.
    ``backward(grad, query, key, value, out, log, mask)`` returns the gradients of query, key and
    value.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Kernel | None:
    """Return an attention kernel that supports these operands, or None if there is none.

    Query, key and value must have the same number of heads.
    """
    if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return None
    if not query.numel() or not key.numel():  # kernels would divide by zero
        return None
    if query.is_cpu:
        return _CPU
    if not query.is_cuda or mask.bias is not None:
        return None
    params = SDPAParams(query, key, value, None, 0.0, mask.triangle, False)
    # FlashAttention needs a multiple of 8: torch pads other head sizes before it calls the kernel.
    if query.shape[-1] % 8 == 0 and can_use_flash_attention(params, False):
        return _FLASH
    return _EFFICIENT if can_use_efficient_attention(params, False) else None


# -- the CPU ---------------------------------------------------------------------------------------


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    bias = _kernel_bias(mask.bias, query, key)
    out, log = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask.triangle, attn_mask=bias, scale=mask.scale
    )
    if bias is not None:  # the kernel returns 0 for a row that sees no key
        log = log.masked_fill((bias == -math.inf).all(-1), -math.inf)
    return out, log


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _with_last_dim_dense(grad), query, key, value, out, log, 0.0, mask.triangle,
        attn_mask=_kernel_bias(mask.bias, query, key), scale=mask.scale,
    )  # fmt: skip


def _kernel_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return ``bias`` in the form that the CPU kernel requires, for this query and key.

    It has the query's dtype, four dims, and full size in rows and keys.
    """
    if bias is None:
        return None
    shape = (*[1] * (4 - bias.ndim), *bias.shape[:-2])
    expanded = bias.to(query.dtype).expand(*shape, query.shape[-2], key.shape[-2])
    return _with_last_dim_dense(expanded)


def _with_last_dim_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# -- GPUs ------------------------------------------------------------------------------------------


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    out, log, *_ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, mask.triangle, scale=mask.scale
    )
    return out, log


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # RNG state for dropout
    return _aten._scaled_dot_product_flash_attention_backward(
        _with_last_dim_dense(grad), query, key, value, out, log.contiguous(), None, None,
        query.shape[-2], key.shape[-2], 0.0, mask.triangle, unused, unused, scale=mask.scale,
    )  # fmt: skip


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask
) -> tuple[Tensor, Tensor]:
    out, log, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, mask.triangle, scale=mask.scale
    )
    return out, log[..., : query.shape[-2]]


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    log = pad(log, (0, -log.shape[-1] % _LOG_ALIGNMENT), value=math.inf).contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # RNG state for dropout
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        _with_last_dim_dense(grad), query, key, value, None, out, log, unused, unused, 0.0,
        [True, True, True, False], mask.triangle, scale=mask.scale,
    )  # fmt: skip
    return grads[:3]


_CPU = Kernel(_cpu_forward, _cpu_backward)
_FLASH = Kernel(_flash_forward, _flash_backward)
_EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
