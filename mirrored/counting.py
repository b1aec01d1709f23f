"""Counting what is sent: a transport around another one. Free when it is not used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Handle, Ranks, Shape, Transport, current, replace_current
from .transports.layer import Layer


@dataclass(frozen=True)
class Call:
    """One communication: its name, the bytes this rank sends in it, and the group."""

    name: str
    bytes: int
    ranks: Ranks


class Counting(Layer):
    """Passes every call on to `inner` and records it in `calls`.

    Bytes are those this rank sends under the usual algorithm, with n ranks and x its own tensor:
    all_reduce ceil(2 (n-1)/n |x|) (a ring), all_gather (n-1) |x|, all_to_all and exchange the
    pieces for others, broadcast (n-1) |x| at the source and 0 elsewhere. A reduce-scatter counts as
    the all-to-all of its parts.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    @property
    def bytes(self) -> int:
        """All bytes this rank has sent."""
        return sum(call.bytes for call in self.calls)

    @property
    def names(self) -> list[str]:
        """The names of the calls, in order."""
        return [call.name for call in self.calls]

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def _count(self, name: str, nbytes: int, ranks: Ranks) -> None:
        if len(ranks) > 1:
            self.calls.append(Call(name, nbytes, tuple(ranks)))

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        self._count("all_reduce", _ring(x, ranks), ranks)
        return super().all_reduce(x, ranks, op)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        self._count("all_reduce", _ring(x, ranks), ranks)
        return super().all_reduce_async(x, ranks, op)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        self._count("all_gather", x.nbytes * (len(ranks) - 1), ranks)
        return super().all_gather(x, shapes, ranks, out)

    def join(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        self._count("all_gather", x.nbytes * (len(ranks) - 1), ranks)
        return super().join(x, dim, sizes, ranks)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        self._count("all_gather", x.nbytes * (len(ranks) - 1), ranks)
        return super().peers(x, ranks)

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        self._count("all_to_all", self._parts_for_others(x, dim, sizes, ranks), ranks)
        return super().addends(x, dim, sizes, ranks)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        others = sum(x.nbytes for x, rank in zip(pieces, ranks, strict=True) if rank != self.rank)
        self._count("all_to_all", others, ranks)
        return super().all_to_all(pieces, shapes, ranks, out)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        self._count("all_to_all", self._parts_for_others(x, dim, sizes, ranks), ranks)
        return super().reduce_scatter(x, dim, sizes, ranks, op)

    def turn(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        sent = self._parts_for_others(x, split_dim, split_sizes, ranks)
        self._count("all_to_all", sent, ranks)
        return super().turn(x, split_dim, split_sizes, concat_dim, concat_sizes, ranks)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        sent = x.nbytes * (len(ranks) - 1) if x is not None and source == self.rank else 0
        self._count("broadcast", sent, ranks)
        return super().broadcast(x, shape, dtype, device, source, ranks)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        self._count("exchange", sum(x.nbytes for to, x in sends if to != self.rank), ranks)
        return super().exchange(sends, receives, ranks, device)

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        if len(ranks) > 1:
            self._count("gather_objects", len(pickle.dumps(obj)) * (len(ranks) - 1), ranks)
        return super().gather_objects(obj, ranks)

    def _parts_for_others(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> int:
        """The bytes of `x`, cut along `dim`, but for this rank's part."""
        own = sizes[ranks.index(self.rank)] if self.rank in ranks else 0
        return x.nbytes // max(x.shape[dim], 1) * (x.shape[dim] - own)


def _ring(x: Tensor, ranks: Ranks) -> int:
    return -(-2 * (len(ranks) - 1) * x.nbytes // len(ranks))


@contextmanager
def counting(transport: Transport | None = None) -> Iterator[Counting]:
    """Count what this rank sends inside the `with` block.

    ```
    with counting() as log:
        y = x.to_global(sbp=B)
    assert log.names == ["all_gather"] and log.bytes == 64
    ```
    """
    with replace_current(Counting(transport or current())) as log:
        assert isinstance(log, Counting)
        yield log
