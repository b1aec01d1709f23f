"""Callables that replace a message and the ops next to it in a program.

They take and return plain tensors, which are this rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ...forms.native import load as native
from ...forms.native.reduce_shards import Epilogue
from ...overlap.chunked_matmul import Boxing, box_multiply_once, multiply_box_once


@dataclass(frozen=True, slots=True)
class Summed:
    """Callable that sums x over ranks and applies the ops after the sum, by one native call.

    The ops are norm(activation(scale * sum + bias + residual)), of which any may be missing.

    ```
    all_reduce        [n, m] P -> [n, m]       reduce_scatter    [n, m] P -> [own, m]
    ```

    It is called with a list: x, then those of bias, residual, weight and norm_bias that are
    ``given``.

    Args:
        ranks: ranks over which x is summed.
        dim: for reduce_scatter, the dim of which each rank gets a part of the sum.
        sizes: sizes of the ranks' parts along ``dim``; None for all_reduce, where every rank gets
            the whole sum.
        epilogue: scale, activation and norm.
        given: whether bias, residual, weight (of the norm) and norm_bias are passed, in this order.
        keeps: whether to return, as a second result, the input of the activation and the norm,
            which backward needs.
        dtype: dtype of the results; None: the dtype of x.
    """

    ranks: Ranks
    dim: int
    sizes: tuple[int, ...] | None
    epilogue: Epilogue
    given: tuple[bool, ...]
    keeps: bool
    dtype: torch.dtype | None = None

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, *extra_inputs = xs
        remaining_inputs = iter(extra_inputs)
        bias, residual, weight, norm_bias = (
            next(remaining_inputs) if is_given else None for is_given in self.given
        )
        epilogue = self.epilogue
        with self._open_addends(x) as (parts, start, size):
            out, total = native.reduce_shards(
                parts, self.dim, start, size,
                scale=epilogue.scale, bias=bias, residual=residual, activation=epilogue.activation,
                norm=epilogue.norm, normalized=epilogue.normalized, weight=weight,
                norm_bias=norm_bias, eps=epilogue.eps, keep_total=self.keeps, dtype=self.dtype,
            )  # fmt: skip
        return [out, total] if self.keeps else [out]

    @contextmanager
    def _open_addends(self, x: Tensor) -> Iterator[tuple[list[Tensor], int, int]]:
        """Yield (tensors, start, size), from which the kernel computes this rank's result.

        The result is the range [start, start + size) along ``dim`` of the sum of the tensors. They
        may be the addends of all ranks, or one tensor that the transport has summed.
        """
        transport = current()
        if self.sizes is not None:
            own_size = self.sizes[self.ranks.index(transport.rank)]
            with transport.addends(x, self.dim, self.sizes, self.ranks) as (parts, start):
                yield parts, start, own_size
        elif x.is_cuda and transport.shares(self.ranks, "cuda", x.nbytes):
            with transport.peers(x, self.ranks) as parts:
                yield parts, 0, x.shape[self.dim]
        else:  # the transport adds, while the data is still in the cache
            yield [transport.all_reduce(x, self.ranks)], 0, x.shape[self.dim]


@dataclass(frozen=True, slots=True)
class MultipliedSum:
    """Callable that computes x @ w, a partial sum (P), and boxes it in overlapping chunks.

    Called with [x, w] or [x, w, bias] of shapes [m, k], [k, n], [n]; it returns one tensor. The
    bias is added on each rank, and so is summed too.

    Args:
        boxing: specs before and after, such as of P and B (an all-reduce), and number of chunks.
        lead: sizes to which the m rows of x are reshaped: all but the last size of the recorded
            result of the matmul.
    """

    boxing: Boxing
    lead: tuple[int, ...]

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, w, *bias = xs
        return [multiply_box_once(self.boxing, x.view(*self.lead, x.shape[1]), w, *bias)]


@dataclass(frozen=True, slots=True)
class MultipliedWhole:
    """Callable that gathers x (from S to B) and multiplies it by w, in overlapping chunks.

    Called with [x, w] or [x, w, bias] of shapes [m, k], [k, n], [n], where x is this rank's shard.
    It returns the result of the matmul, [rows, n], and the gathered x.
    """

    boxing: Boxing

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, w, *bias = xs
        y, boxed = box_multiply_once(self.boxing, x, w, *bias)
        return [y.flatten(0, -2), boxed]
