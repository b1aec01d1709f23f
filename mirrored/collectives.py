"""Collectives on plain tensors over the current transport, not recorded by autograd.

``ranks`` are the world ranks that take part; all of them make the call. ``S -> B`` names the
layouts before and after a collective: S is sharded, B replicated (broadcast), P a partial sum,
whose logical value is the sum over ranks.

In the drawings each column is a rank and letters are rows of numbers. The drawing under "backward",
read from right to left, shows what happens to gradients: the transpose of a collective is again a
collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .comm import Ranks
from .transports.default import current
from .transports.failures import counts_out_of_memory


@counts_out_of_memory
def all_reduce(x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
    """Return the elementwise sum (or max, min) of all ranks' ``x``, as a new tensor.

    Partial sums become replicated (``P -> B``). All ranks pass one shape. Raises ValueError if
    ``op`` is not "sum", "max" or "min".

    ```
    forward    rank 0   rank 1   rank 2             rank 0   rank 1   rank 2
                 a        b        c       --->      a+b+c    a+b+c    a+b+c
    backward   x+y+z    x+y+z    x+y+z     <---        x        y        z
    ```
    """
    return current().all_reduce(x, ranks, op)


@counts_out_of_memory
def all_gather(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """Return all ranks' ``x`` concatenated along ``dim``, as a new tensor.

    Shards become replicated (``S -> B``). The ``x`` of ``ranks[k]`` has size ``sizes[k]`` along
    ``dim``.

    ```
    forward    rank 0   rank 1   rank 2             rank 0   rank 1   rank 2
                 a        .        .                   a        a        a
                 .        b        .       --->        b        b        b
                 .        .        c                   c        c        c

    backward   the sum over ranks, each its part: reduce_scatter
               x0+y0+z0    .        .                  x0       y0       z0
                 .      x1+y1+z1    .      <---        x1       y1       z1
                 .         .     x2+y2+z2              x2       y2       z2
    ```
    """
    return current().all_gather_into_tensor(x, dim, sizes, ranks)


@counts_out_of_memory
def reduce_scatter(
    x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
) -> Tensor:
    """Sum ``x`` over ranks (or max, min) and return this rank's part along ``dim``.

    Partial sums become shards (``P -> S``): ``ranks[k]`` gets part k, of size ``sizes[k]``.

    ```
    forward    rank 0   rank 1   rank 2             rank 0      rank 1      rank 2
                 a0       b0       c0               a0+b0+c0       .           .
                 a1       b1       c1      --->        .        a1+b1+c1       .
                 a2       b2       c2                  .           .        a2+b2+c2

    backward   all_gather
                 x        x        x                   x           .           .
                 y        y        y       <---        .           y           .
                 z        z        z                   .           .           z
    ```
    """
    return current().reduce_scatter(x, dim, sizes, ranks, op)


@counts_out_of_memory
def all_to_all(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    ranks: Ranks,
) -> Tensor:
    """Turn shards along ``concat_dim`` into shards along ``split_dim``.

    The layout goes from ``S(concat_dim)`` to ``S(split_dim)``. ``split_sizes[k]`` is the size along
    ``split_dim`` of the shard that ``ranks[k]`` gets; ``concat_sizes[k]`` is the size along
    ``concat_dim`` of the shard that it held before.

    ```
    forward    rank 0     rank 1     rank 2             rank 0   rank 1   rank 2
               a0 a1 a2      .          .                 a0       a1       a2
                  .       b0 b1 b2      .       --->      b0       b1       b2
                  .          .       c0 c1 c2             c0       c1       c2

    backward   the same, the other way round
               x0 y0 z0      .          .                 x0       y0       z0
                  .       x1 y1 z1      .       <---      x1       y1       z1
                  .          .       x2 y2 z2             x2       y2       z2
    ```
    """
    return current().all_to_all_single(x, split_dim, split_sizes, concat_dim, concat_sizes, ranks)


@counts_out_of_memory
def broadcast(
    x: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    source: int,
    ranks: Ranks,
) -> Tensor:
    """Return a copy of the ``x`` of world rank ``source`` on every rank.

    The result has ``shape`` and ``dtype`` and is on ``device``. ``x`` is read on the source only.
    Raises ValueError if ``source`` is not one of ``ranks``.

    ```
    forward    rank 0   rank 1   rank 2             rank 0   rank 1   rank 2
                 a        .        .       --->        a        a        a
    backward   x+y+z      .        .       <---        x        y        z
    ```
    """
    return current().broadcast(x, shape, dtype, device, source, ranks)
