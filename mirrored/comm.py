"""The small interface every transport offers: plain tensors move between ranks, no autograd.

`ranks` is always an ordered tuple of world ranks, and its order means what it says: piece k belongs
to `ranks[k]`. Every rank of `ranks` makes the same call in the same order; no other rank calls.

Invariants, kept here once for all transports:
* a group of one rank never communicates;
* results never share memory with the inputs (except `all_reduce_async`, which may work in place);
* pieces may differ in shape and may be empty; a call whose pieces are all empty sends nothing.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Ranks = tuple[int, ...]
Shape = Sequence[int]
OPS = ("sum", "max", "min")


class Handle(Protocol):
    """A reduction under way; `wait()` gives its result and may be called once."""

    def wait(self) -> Tensor: ...


class Done:
    """A handle whose result is already there."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Transport(ABC):
    """Moves plain tensors between ranks.

    A new transport writes the five methods with an underscore. They are called on two or more
    ranks, with detached tensors, and fill the `out` tensors given to them, which are contiguous.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank in the world."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks in the world."""

    @abstractmethod
    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        """Start reducing `x`, which it may overwrite."""

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None: ...

    @abstractmethod
    def _all_to_all(
        self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
    ) -> None: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        """Fill the contiguous `x` on every rank with that of `source`."""

    @abstractmethod
    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Send and fill; no peer is this rank and no tensor is empty."""

    @abstractmethod
    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]: ...

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        """The elementwise `op` ("sum", "max", "min") of `x` over `ranks`: a new tensor, same bits
        on every rank. For bool, "sum" is or. Raises ValueError on another op."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        return self.all_reduce_async(x, ranks, op).wait()

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        """`all_reduce` under way; `x` belongs to the transport until `wait()` has returned, and
        may hold the result or rubbish after it. Use what `wait()` returns."""
        check_member("all_reduce", self.rank, ranks, x)
        if op not in OPS:
            raise ValueError(
                f"all_reduce: op={op!r} is not known.\n  Ranks combine by one of {OPS}.\n"
                "  For a mean, sum and then divide."
            )
        x = x.detach()
        if len(ranks) == 1 or x.numel() == 0:
            return Done(x)
        return self._reduce(x, ranks, op)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Every rank's `x`: piece k has shape `shapes[k]` and comes from `ranks[k]`.

        `out` gives contiguous tensors to fill (slices of one tensor, say) instead of new ones.
        """
        me = check_member("all_gather", self.rank, ranks, x)
        _check_shapes("all_gather: x", [x.shape], [shapes[me]])
        pieces = _outputs(x, shapes, out)
        if len(ranks) == 1:
            pieces[0].copy_(x.detach())
        elif any(map(math.prod, shapes)):
            self._all_gather(x.detach(), pieces, ranks)
        return pieces

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """`pieces[k]` goes to `ranks[k]`; the result's piece k, of shape `shapes[k]`, comes from
        `ranks[k]`. `out` as in `all_gather`."""
        me = check_member("all_to_all", self.rank, ranks, *pieces)
        _check_shapes("all_to_all: own piece", [pieces[me].shape], [shapes[me]])
        received = _outputs(pieces[me], shapes, out)
        if len(ranks) == 1:
            received[0].copy_(pieces[0].detach())
        else:
            self._all_to_all([piece.detach() for piece in pieces], received, ranks)
        return received

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        """The `x` of world rank `source`, as a new tensor on every rank; `x` is read only there."""
        check_member("broadcast", self.rank, ranks)
        check_member("broadcast from source", source, ranks)
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        if source == self.rank:
            assert x is not None, "broadcast: the source gives x"
            check_member("broadcast", self.rank, ranks, x)
            _check_shapes("broadcast: x", [x.shape], [shape])
            out.copy_(x.detach())
        if len(ranks) > 1 and out.numel():
            self._broadcast(out, source, ranks)
        return out

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        """Point to point in one batch: `sends` are (to, tensor), `receives` (from, shape, dtype).

        Between two ranks messages match in order; a rank may send to itself. No order of the
        lists can deadlock. Every rank of `ranks` calls, also one with nothing to send or receive.
        """
        me = self.rank
        check_member("exchange", me, ranks, *(x for _, x in sends))
        out = [
            torch.empty(tuple(shape), dtype=dtype, device=device) for _, shape, dtype in receives
        ]
        own = iter([x for peer, x in sends if peer == me])
        for (peer, _, _), x in zip(receives, out, strict=True):
            if peer == me:
                x.copy_(next(own).detach())
        going = [(peer, x.detach()) for peer, x in sends if peer != me and x.numel()]
        coming = [
            (peer, x)
            for (peer, _, _), x in zip(receives, out, strict=True)
            if peer != me and x.numel()
        ]
        if len(ranks) > 1:
            self._exchange(going, coming, ranks, torch.device(device))
        return out

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Every rank's picklable `obj`, in the order of `ranks`: for small metadata and checks."""
        check_member("gather_objects", self.rank, ranks)
        return [obj] if len(ranks) == 1 else self._gather_objects(obj, ranks)


def check_member(what: str, rank: int, ranks: Ranks, *tensors: Tensor) -> int:
    """The position of `rank` in `ranks`. Raises ValueError if it is not there, or on `meta`."""
    if rank not in ranks:
        raise ValueError(
            f"{what}: rank {rank} is not one of the ranks {tuple(ranks)}.\n"
            "  Only the ranks of a group take part in its communication.\n"
            "  Let the other ranks skip the call."
        )
    for x in tensors:
        if x.is_meta:
            raise ValueError(
                f"{what}: a meta tensor of shape {tuple(x.shape)} was given on rank {rank}.\n"
                "  Meta tensors have no data to send.\n"
                "  Ranks that hold real shards communicate; the others skip the call."
            )
    return ranks.index(rank)


def _check_shapes(what: str, given: Sequence[Shape], promised: Sequence[Shape]) -> None:
    for a, b in zip(given, promised, strict=True):
        if tuple(a) != tuple(b):
            raise ValueError(
                f"{what} has shape {tuple(a)}, but {tuple(b)} was promised to the other ranks.\n"
                "  They would wait for bytes that never come.\n"
                "  Pass the shape this rank's piece has."
            )


def _outputs(like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None) -> list[Tensor]:
    if out is not None:
        _check_shapes("out", [x.shape for x in out], shapes)
        assert all(x.is_contiguous() for x in out), "out: the pieces must be contiguous"
        return list(out)
    return [torch.empty(tuple(s), dtype=like.dtype, device=like.device) for s in shapes]


class _Thread(threading.local):
    override: Transport | None = None


_thread = _Thread()
_default: Transport | None = None


def current() -> Transport:
    """The transport of this thread: the one given by `use`, else that of torch.distributed."""
    return _thread.override or _default or _make_default()


def _make_default() -> Transport:
    global _default
    from .transports.torch_dist import TorchDist

    _default = TorchDist()
    return _default


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Make `transport` this thread's current one inside the `with` block."""
    before, _thread.override = _thread.override, transport
    try:
        yield transport
    finally:
        _thread.override = before


@contextmanager
def replace_current(transport: Transport) -> Iterator[Transport]:
    """Like `use`, but where no `use` is active it holds for all threads.

    Backward on CUDA runs in threads of the autograd engine; they must see `transport` too.
    """
    global _default
    if _thread.override is not None:
        with use(transport):
            yield transport
        return
    before, _default = _default, transport
    try:
        yield transport
    finally:
        _default = before
