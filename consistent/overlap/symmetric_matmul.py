"""Matmuls fused with an all-gather or reduce-scatter, by CUDA symmetric memory.

Torch has one op for each of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mirrored.transports.symmetric_memory.torch_group import group_name

from ..boxing.chunks import affordable_chunks
from ..movement.speeds import start_bytes
from ..movement.world import my_coordinate
from ..spec import B, P, Split, TensorSpec

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_group_and_dim(src: TensorSpec, dst: TensorSpec) -> tuple[str, int] | None:
    """Return (process group name, split dim) for torch to fuse this boxing with a matmul.

    None if torch has no op that fuses them. It has one for S(dim) -> B and P -> S(dim) with equal
    shards of a dim other than the last, over the GPUs of one axis, if there is enough to send that
    overlap pays off.

    The answer depends on the specs and on what the ranks have agreed on, so it is the same on every
    rank.
    """
    placement = src.placement
    if placement.type != "cuda" or placement.size < 2 or src.dtype not in _DTYPES:
        return None
    axes = [a for a, n in enumerate(placement.shape) if n > 1]
    if len(axes) != 1 or my_coordinate(placement) is None:
        return None
    before, after = src.sbp[axes[0]], dst.sbp[axes[0]]
    split = before if after is B else after if before is P else None
    if not isinstance(split, Split) or split.dim == src.ndim - 1:
        return None
    if src.numel == 0 or src.shape[split.dim] % placement.size:
        return None
    if affordable_chunks(src, dst, 2, start_bytes(placement.type)) < 2:
        return None
    name = group_name(tuple(placement.ranks.ravel().tolist()), "cuda")
    return None if name is None else (name, split.dim)


def gather_multiply(x: Tensor, w: Tensor, group_and_dim: tuple[str, int]) -> tuple[Tensor, Tensor]:
    """Return ``(gathered x, gathered x @ w)`` by one fused op of torch, for CUDA shards.

    ``group_and_dim`` is the result of ``fused_group_and_dim``.
    """
    name, dim = group_and_dim
    boxed, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [w], dim, name)
    return boxed.contiguous(), y.contiguous()


def multiply_scatter(x: Tensor, w: Tensor, group_and_dim: tuple[str, int]) -> Tensor:
    """Return this rank's shard of the sum of ``x @ w`` over ranks, by one fused op of torch.

    ``group_and_dim`` is the result of ``fused_group_and_dim``.
    """
    name, dim = group_and_dim
    y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), w, "sum", dim, name)
    return y.contiguous()
