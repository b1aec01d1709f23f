"""The small interface every transport offers: plain tensors move between ranks, no autograd.

`ranks` is always an ordered tuple of world ranks, and its order means what it says: piece k belongs
to `ranks[k]`. Every rank of `ranks` makes the same call in the same order; no other rank calls.

Invariants, kept by all transports:
* a group of one rank never communicates;
* results never share memory with the inputs (except `all_reduce_async`, which may work in place);
* pieces may differ in shape and may be empty.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .ordered import ordered_reduce

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

    A transport that reaches other ranks is a `CheckedTransport`; one around another, a `Layer`.
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
    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        """`all_reduce` under way; `x` belongs to the transport until `wait()` has returned, and
        may hold the result or rubbish after it. Use what `wait()` returns."""

    @abstractmethod
    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Every rank's `x`: piece k has shape `shapes[k]` and comes from `ranks[k]`.

        `out` gives contiguous tensors to fill (slices of one tensor, say) instead of new ones.
        """

    @abstractmethod
    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """`pieces[k]` goes to `ranks[k]`; the result's piece k, of shape `shapes[k]`, comes from
        `ranks[k]`. `out` as in `all_gather`."""

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Every rank's picklable `obj`, in the order of `ranks`: for small metadata and checks."""

    def shares(self, ranks: Ranks, kind: str) -> bool:
        """Whether `ranks` read each other's memory on devices of this kind ("cpu", "cuda"). The
        first call is a collective of them."""
        return False

    # ---- made of those above, or better ---------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        """The elementwise `op` ("sum", "max", "min") of `x` over `ranks`: a new tensor, same bits
        on every rank. For bool, "sum" is or. Raises ValueError on another op."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        return self.all_reduce_async(x, ranks, op).wait()

    def join(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        """All ranks' `x`, joined along `dim`, where that of `ranks[k]` has size `sizes[k]`."""
        shapes = [_resized(x.shape, dim, size) for size in sizes]
        out, slots = _joinable(x, shapes, dim)
        pieces = self.all_gather(x, shapes, ranks, slots)
        return torch.cat(pieces, dim) if out is None else out

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        """The `op` of `x` over `ranks`, cut along `dim`: `ranks[k]` gets part k of `sizes`.

        An all-to-all of the parts, combined in the order of `ranks`: the bytes of a reduce-scatter,
        and the same bits whichever rank holds a part and however the parts are cut.
        """
        own = sizes[check_member("reduce_scatter", self.rank, ranks)]
        shapes = [_resized(x.shape, dim, own)] * len(ranks)
        return ordered_reduce(self.all_to_all(x.split(list(sizes), dim), shapes, ranks), op)

    def turn(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        """Held in parts of `concat_dim`, now in parts of `split_dim`: an all-to-all.

        `split_sizes[k]` is what `ranks[k]` gets, `concat_sizes[k]` what it held.
        """
        own = split_sizes[check_member("all_to_all", self.rank, ranks)]
        kept = _resized(x.shape, split_dim, own)
        shapes = [_resized(kept, concat_dim, size) for size in concat_sizes]
        out, slots = _joinable(x, shapes, concat_dim)
        pieces = self.all_to_all(x.split(list(split_sizes), split_dim), shapes, ranks, slots)
        return torch.cat(pieces, concat_dim) if out is None else out

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        """Every rank's `x`, all of one shape, to be read inside the `with` block and not after it.

        Where the ranks share memory these are views of it, so that a kernel can read all of them in
        one pass; no other communication of these ranks may happen inside the block.
        """
        return nullcontext(self.all_gather(x, [x.shape] * len(ranks), ranks))

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        """(tensors, start): they add up, in order, to a sum of which this rank's part of `sizes`,
        cut along `dim`, begins at `start`. To be read inside the `with` block.

        By default the one tensor that `reduce_scatter` gives. A transport whose ranks read each
        other's memory faster than they reduce gives every rank's `x`, as in `peers`.
        """
        return nullcontext(([self.reduce_scatter(x, dim, sizes, ranks)], 0))


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


def check_op(op: str) -> None:
    """Raises ValueError if ranks do not combine by `op`."""
    if op not in OPS:
        raise ValueError(
            f"all_reduce: op={op!r} is not known.\n  Ranks combine by one of {OPS}.\n"
            "  For a mean, sum and then divide."
        )


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    shape = list(shape)
    shape[dim] = size
    return shape


def _joinable(
    like: Tensor, shapes: Sequence[Sequence[int]], dim: int
) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """A tensor that joins pieces of `shapes` along `dim`, and its slices to receive them into.

    Only where the dims before `dim` are 1 are slices contiguous; else (None, None), and the pieces
    are joined by one more copy.
    """
    shape = shapes[0]
    if any(n != 1 for n in shape[: dim % len(shape)]):
        return None, None
    sizes = [piece[dim] for piece in shapes]
    out = torch.empty(_resized(shape, dim, sum(sizes)), dtype=like.dtype, device=like.device)
    return out, out.split(sizes, dim)


class _Thread(threading.local):
    override: Transport | None = None


_thread = _Thread()
_default: Transport | None = None


def current() -> Transport:
    """The transport of this thread: the one given by `use`, else that of torch.distributed."""
    return _thread.override or _default or _make_default()


def _make_default() -> Transport:
    global _default
    from .transports.shared_memory import SharedMemory
    from .transports.symmetric_memory import SymmetricMemory
    from .transports.torch_dist import TorchDist

    shared = SharedMemory(TorchDist())
    _default = SymmetricMemory(shared) if torch.cuda.is_available() else shared
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
