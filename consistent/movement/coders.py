"""Codecs by which one parameter is sent in fewer bytes, and the state that its gradients need.

The state is the *unsent rest*: the rounding errors of gradients sent so far, which are added to the
next one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch import Tensor

from mirrored.codecs import BLOCK, CODECS, Codec, store_rounding_error
from mirrored.comm import Shape
from mirrored.reduction import accumulation_dtype

from ..boxing.steps import Move
from .low_rank import LowRank, first_basis, next_basis

_LOW_RANK = re.compile(rf"powersgd:([1-9]\d{{0,3}})(?::({'|'.join(CODECS)}))?")


def codec_named(name: str) -> Codec | LowRank | None:
    """Return the codec with a name such as "int8" or "powersgd:4:int8"; None if there is none.

    Parallelization plans use these names.
    """
    match = _LOW_RANK.fullmatch(name)
    if match is None:
        return CODECS.get(name)
    return LowRank(int(match[1]), CODECS.get(match[2]))


def codec_if_smaller(name: str | None, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """Return the codec ``name`` if it saves bytes for this dtype and shape, else None."""
    codec = None if name is None else codec_named(name)
    if codec is None or isinstance(codec, LowRank):
        return codec if codec is not None and codec.fits(shape, dtype) else None
    return codec if codec.nbytes(BLOCK) < BLOCK * dtype.itemsize else None


def with_coded_bytes(move: Move, codec: Codec | LowRank, sizes: Sequence[int], dims: Shape) -> Move:
    """Return ``move`` with the number of bytes that the busiest rank sends if it uses ``codec``.

    Reports and tracers get this move in place of the planned one.

    Args:
        move: the planned move, with the bytes of uncompressed elements.
        codec: the codec that compresses it.
        sizes: number of elements of each rank's part.
        dims: the shape of all parts together.
    """
    others = len(sizes) - 1
    if isinstance(codec, LowRank):
        nbytes = codec.sent_bytes(dims, len(sizes))
    else:
        parts = [codec.nbytes(n) for n in sizes]
        gather_bytes, reduce_bytes = ([others * x for x in parts], [sum(parts) - x for x in parts])
        bytes_by_kind = {"all_gather": gather_bytes, "reduce_scatter": reduce_bytes}
        nbytes = max(bytes_by_kind.get(move.kind) or map(add, gather_bytes, reduce_bytes))
    return replace(move, nbytes=nbytes, codec=codec.name)


class Coder:
    """The codecs that compress one parameter or its gradient, and their state on this rank.

    The state is the unsent rest, the rounding errors of gradients so far, which are added to the
    next one; and for a low-rank codec the basis of the next sum.

    Args:
        gather: codec of its values; None sends them in full.
        reduce: codec of the addends of its gradient; None sends them in full.
        shape: the shape of these addends on this rank.
    """

    def __init__(
        self, gather: Codec | None, reduce: Codec | LowRank | None, shape: Sequence[int]
    ) -> None:
        self.gather, self.reduce, self.shape = gather, reduce, tuple(shape)
        # The unsent rest: the rounding error of this rank's addends, which is added to the next
        # ones. It has as many elements as the gathered parameter, and starts at zero when a module
        # is copied or loaded.
        self.unsent: Tensor | None = None
        # The next basis of a sum of low rank, and the initial one.
        self.basis: Tensor | None = None
        self.initial_basis: Tensor | None = None

    def begin(self, param: Tensor) -> None:
        """Allocate the state for gradients of ``param``, if it is not there.

        It does nothing for a parameter that needs no gradient, which may need one later. The unsent
        rest of a short float, such as bfloat16, is kept in float32, in which addends are summed.
        """
        if self.reduce is None or self.unsent is not None or not param.requires_grad:
            return
        if param.is_meta:  # without values yet
            return
        dtype = accumulation_dtype(param.dtype)
        self.unsent = torch.zeros(self.shape, dtype=dtype, device=param.device)
        if isinstance(self.reduce, LowRank):
            self.initial_basis = first_basis(self.shape, self.reduce.rank, param.device)
            self.basis = self.initial_basis.clone()

    def with_unsent(self, addend: Tensor) -> Tensor:
        """Return ``addend`` plus the rounding errors of earlier ones, which is to be sent."""
        return addend if self.unsent is None else addend + self.unsent

    def store_rounding_error(self, addend: Tensor, sent: Tensor) -> None:
        """Store ``addend - sent``, a codec's rounding error, to be added to the next addend."""
        if self.unsent is not None:
            store_rounding_error(self.unsent, addend, sent)

    def unsent_parts(self, sizes: Sequence[int], dim: int) -> Sequence[Tensor | None]:
        """Split the unsent rest along ``dim`` into a view for each rank, or None for each rank.

        It is the rounding errors of earlier addends; ``sizes`` are those of the ranks' parts. A
        codec writes the new rounding errors into the views.
        """
        return [None] * len(sizes) if self.unsent is None else self.unsent.split(list(sizes), dim)

    def times_basis(self, m: Tensor) -> Tensor:
        """Return ``m @ basis``, the first thin matrix of a low-rank sum (p in ``low_rank``)."""
        assert self.basis is not None, "begin() was called"
        return m @ self.basis

    def update_basis(self, q: Tensor) -> None:
        """Make the columns of ``q``, the second thin matrix, the basis of the next sum."""
        assert self.basis is not None and self.initial_basis is not None, "begin() was called"
        self.basis.copy_(next_basis(q, self.initial_basis))

    def __reduce__(self) -> Any:
        return Coder, (self.gather, self.reduce, self.shape)
