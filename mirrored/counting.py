"""Counting what is sent: a transport around another one. Free when it is not used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Handle, Ranks, Shape, Transport, current, replace_current


@dataclass(frozen=True)
class Call:
    """One communication: its name, the bytes this rank sends in it, and the group."""

    name: str
    bytes: int
    ranks: Ranks


class Counting(Transport):
    """Passes every call on to `inner` and records it in `calls`.

    Bytes are those this rank sends under the usual algorithm, with n ranks and x its own tensor:
    all_reduce ceil(2 (n-1)/n |x|) (a ring), all_gather (n-1) |x|, all_to_all and exchange the
    pieces for others, broadcast (n-1) |x| at the source and 0 elsewhere.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.calls: list[Call] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

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

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        n = len(ranks)
        self._count("all_reduce", -(-2 * (n - 1) * x.nbytes // n), ranks)
        return self.inner.all_reduce_async(x, ranks, op)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        self._count("all_gather", x.nbytes * (len(ranks) - 1), ranks)
        return self.inner.all_gather(x, shapes, ranks, out)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        others = sum(x.nbytes for x, rank in zip(pieces, ranks, strict=True) if rank != self.rank)
        self._count("all_to_all", others, ranks)
        return self.inner.all_to_all(pieces, shapes, ranks, out)

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
        return self.inner.broadcast(x, shape, dtype, device, source, ranks)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        self._count("exchange", sum(x.nbytes for to, x in sends if to != self.rank), ranks)
        return self.inner.exchange(sends, receives, ranks, device)

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        if len(ranks) > 1:
            self._count("gather_objects", len(pickle.dumps(obj)) * (len(ranks) - 1), ranks)
        return self.inner.gather_objects(obj, ranks)

    # The public methods above do not reach these.
    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        raise NotImplementedError

    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        raise NotImplementedError

    def _all_to_all(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        raise NotImplementedError

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        raise NotImplementedError

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        raise NotImplementedError


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
