"""Every move of a transport, on tensors of all kinds, and what must be equal of the results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import mirrored
from mirrored import current

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ODD = [math.nan, math.inf, -math.inf, -0.0, 1e-7, 65504.0]


def numbers(seed: int, shape: list[int], dtype: torch.dtype, odd: bool) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64) * 50
    if dtype.is_floating_point and odd and x.numel():
        places = torch.randint(x.numel(), (6,), generator=g)
        x.view(-1)[places] = torch.tensor(ODD, dtype=torch.float64)
    return x.to(torch.float32).to(dtype)


def all_moves(
    rank: int,
    n: int,
    shape: list[int],
    dtype: Any,
    turned: bool,
    odd: bool,
    lists: bool = True,
) -> list[Tensor]:
    """`shape` with its first dim cut unevenly, and its last; `lists` of pieces too."""
    ranks = tuple(range(n))
    rows = [shape[0] * k // 2 for k in range(n)]
    columns = [shape[-1] * (k + 1) // 3 for k in range(n)]
    whole = numbers(0, [sum(rows), *shape[1:-1], sum(columns)], dtype, odd)
    x = numbers(rank + 1, list(whole.shape), dtype, odd)
    own = whole.split(columns, -1)[rank]
    if turned:
        x, own = x.mT.contiguous().mT, own.mT.contiguous().mT
    out = [
        mirrored.all_gather(own, -1, columns, ranks),
        mirrored.all_gather(whole.split(rows, 0)[rank], 0, rows, ranks),
        mirrored.all_to_all(own, 0, rows, whole.dim() - 1, columns, ranks),
        mirrored.broadcast(x, x.shape, x.dtype, "cpu", n - 1, ranks),
    ]
    if lists:
        out += current().all_gather(x[:rank], [x[:k].shape for k in ranks], ranks)
    for op in ("sum",) if dtype.is_complex else ("sum", "max", "min"):
        out.append(mirrored.all_reduce(x, ranks, op))
        out.append(mirrored.reduce_scatter(x, 0, rows, ranks, op))
        out.append(mirrored.reduce_scatter(x, -1, columns, ranks, op))
    with current().peers(x, ranks) as views:
        out += [view.clone() for view in views]
    return out


def bits(x: Tensor) -> bytes:
    """What must be equal; all NaNs are one."""
    if x.dtype.is_floating_point:
        x = torch.where(x.float().isnan(), torch.tensor(math.nan), x.float()) + 0.0
    return x.contiguous().view(torch.uint8).numpy().tobytes()
