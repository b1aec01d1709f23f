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
    """Callable that sums x over ranks and applies the ops that follow, such as bias, activation and
    norm.

    ```
    all_reduce        [n, m] P -> [n, m]       reduce_scatter    [n, m] P -> [own, m]
    ```

    With reduce_scatter the result is this rank's part of the sum. Called with x, and with those of
    bias, residual, weight and norm_bias that are ``given``. Returns the result and, with ``keeps``,
    the input of the activation or the norm, which backward needs.

    Args:
        sizes: sizes of the ranks' parts along ``dim``; None for all_reduce, where every rank gets
            the whole sum.
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
        x, *beside = xs
        left = iter(beside)
        bias, residual, weight, norm_bias = (next(left) if there else None for there in self.given)
        how = self.epilogue
        with self._parts(x) as (parts, start, size):
            out, total = native.reduce_shards(
                parts, self.dim, start, size,
                scale=how.scale, bias=bias, residual=residual, activation=how.activation,
                norm=how.norm, normalized=how.normalized, weight=weight, norm_bias=norm_bias,
                eps=how.eps, keep_total=self.keeps, dtype=self.dtype,
            )  # fmt: skip
        return [out, total] if self.keeps else [out]

    @contextmanager
    def _parts(self, x: Tensor) -> Iterator[tuple[list[Tensor], int, int]]:
        """Yield (tensors, start, size) from which the kernel computes this rank's result.

        The result is the range [start, start + size) along ``dim`` of the sum of the tensors.
        """
        transport = current()
        if self.sizes is not None:
            own = self.sizes[self.ranks.index(transport.rank)]
            with transport.addends(x, self.dim, self.sizes, self.ranks) as (parts, start):
                yield parts, start, own
        elif x.is_cuda and transport.shares(self.ranks, "cuda", x.nbytes):
            with transport.peers(x, self.ranks) as parts:
                yield parts, 0, x.shape[self.dim]
        else:  # the transport adds, while the data is still in the cache
            yield [transport.all_reduce(x, self.ranks)], 0, x.shape[self.dim]


@dataclass(frozen=True, slots=True)
class MultipliedSum:
    """Callable that computes x @ w and boxes the partial product (P), such as by an all-reduce, in
    overlapping chunks.

    A bias is added to the partial products, and so is summed too. Shapes: [m, k], [k, n], [n] ->
    the boxed tensor.

    Args:
        lead: the sizes that the m rows have in the boxed tensor.
    """

    boxing: Boxing
    lead: tuple[int, ...]

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, w, *bias = xs
        return [multiply_box_once(self.boxing, x.view(*self.lead, x.shape[1]), w, *bias)]


@dataclass(frozen=True, slots=True)
class MultipliedWhole:
    """Callable that gathers x (boxes it to B) and multiplies it with w, in overlapping chunks, and
    adds a bias.

    Shapes: [m, k] S, [k, n], [n] -> [rows, n] and the gathered x.
    """

    boxing: Boxing

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        x, w, *bias = xs
        y, boxed = box_multiply_once(self.boxing, x, w, *bias)
        return [y.flatten(0, -2), boxed]
