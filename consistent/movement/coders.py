"""How one parameter is sent in fewer bytes, and what of its gradients was not sent yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch import Tensor

from mirrored.codecs import BLOCK, CODECS, Codec, keep_rest
from mirrored.comm import Shape

from ..boxing.steps import Move
from .low_rank import LowRank, first_basis, next_basis

_LOW_RANK = re.compile(r"powersgd:([1-9]\d{0,3})")


def codec_named(name: str) -> Codec | LowRank | None:
    """The codec that a plan calls so; None if there is none."""
    found = _LOW_RANK.fullmatch(name)
    return LowRank(int(found[1])) if found else CODECS.get(name)


def shorter(name: str | None, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """The codec of that name, where it sends fewer bytes than numbers of ``dtype`` have."""
    codec = None if name is None else codec_named(name)
    if codec is None or isinstance(codec, LowRank):
        return codec if codec is not None and codec.fits(shape) else None
    return codec if codec.nbytes(BLOCK) < BLOCK * dtype.itemsize else None


def by_codec(move: Move, codec: Codec | LowRank, sizes: Sequence[int], dims: Shape) -> Move:
    """``move`` with the bytes that the busiest rank sends by ``codec``.

    Args:
        sizes: of the ranks' parts, in numbers.
        dims: the shape of all of them together.
    """
    others = len(sizes) - 1
    if isinstance(codec, LowRank):
        nbytes = 2 * others * codec.numbers(dims) * 4 // len(sizes)
    else:
        parts = [codec.nbytes(n) for n in sizes]
        gathered, summed = ([others * x for x in parts], [sum(parts) - x for x in parts])
        sent = {"all_gather": gathered, "reduce_scatter": summed}
        nbytes = max(sent.get(move.kind) or map(add, gathered, summed))
    return replace(move, nbytes=nbytes, codec=codec.name)


class Coder:
    """The codecs of one parameter.

    Args:
        gather: for its values; None sends them as they are.
        reduce: for addends of its gradient; None sends them as they are.
    """

    def __init__(self, gather: Codec | None, reduce: Codec | LowRank | None) -> None:
        self.gather, self.reduce = gather, reduce
        # What codecs have left out of this rank's addends: it is added to the next ones. It is as
        # large as the gathered parameter, and starts at zero where a module is copied or loaded.
        self.unsent: Tensor | None = None
        # The next basis of a sum of low rank, and the one to begin with.
        self.basis: Tensor | None = None
        self.first: Tensor | None = None

    def begin(self, shape: Sequence[int], like: Tensor) -> None:
        """Make room for what is not sent of gradients of ``shape``."""
        if self.reduce is not None and not like.is_meta:
            self.unsent = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
        if isinstance(self.reduce, LowRank):
            self.first = first_basis(shape, self.reduce.rank, like.device)
            self.basis = self.first.clone()

    def with_unsent(self, addend: Tensor) -> Tensor:
        """``addend``, and what was not sent of those before."""
        return addend if self.unsent is None else addend + self.unsent

    def keep(self, addend: Tensor, sent: Tensor) -> None:
        """Keep what ``sent`` leaves out of ``addend``."""
        if self.unsent is not None:
            keep_rest(self.unsent, addend, sent)

    def unsent_parts(self, sizes: Sequence[int], dim: int) -> Sequence[Tensor | None]:
        """What was not sent to each rank, as views."""
        return [None] * len(sizes) if self.unsent is None else self.unsent.split(list(sizes), dim)

    def on_basis(self, m: Tensor) -> Tensor:
        """A matrix times the basis of a sum of low rank."""
        assert self.basis is not None, "begin() was called"
        return m @ self.basis

    def turn(self, q: Tensor) -> None:
        """Let ``q`` be the next basis of a sum of low rank."""
        assert self.basis is not None and self.first is not None, "begin() was called"
        self.basis.copy_(next_basis(q, self.first))

    def __reduce__(self) -> Any:
        return Coder, (self.gather, self.reduce)
