"""A transport around another one, which does all that the layer does not do itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..comm import Handle, Ranks, Shape, Transport
from .table import Table


class Layer(Transport):
    """Passes every call on to `inner`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def tune(self, ranks: Ranks) -> Table | None:
        """The table by which this layer goes, measured anew and kept, if it has one. A collective
        of `ranks`."""
        return None

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        return self.inner.all_reduce(x, ranks, op)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        return self.inner.all_reduce_async(x, ranks, op)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.inner.all_gather(x, shapes, ranks, out)

    def join(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        return self.inner.join(x, dim, sizes, ranks)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        return self.inner.reduce_scatter(x, dim, sizes, ranks, op)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        return self.inner.all_to_all(pieces, shapes, ranks, out)

    def turn(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        return self.inner.turn(x, split_dim, split_sizes, concat_dim, concat_sizes, ranks)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        return self.inner.broadcast(x, shape, dtype, device, source, ranks)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        return self.inner.exchange(sends, receives, ranks, device)

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        return self.inner.gather_objects(obj, ranks)

    def shares(self, ranks: Ranks, kind: str) -> bool:
        return self.inner.shares(ranks, kind)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        return self.inner.peers(x, ranks)

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        return self.inner.addends(x, dim, sizes, ranks)
