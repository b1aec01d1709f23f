"""The small interface that every transport offers: it moves plain tensors between ranks, without
autograd.

`ranks` is always an ordered tuple of world ranks, and piece k belongs to `ranks[k]`. All ranks of
`ranks` make the same calls in the same order; no other rank calls.

Invariants, kept by all transports:
* a group of one rank never communicates;
* results never share memory with the inputs (except `all_reduce_async`, which may work in place);
* pieces may differ in shape and may be empty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .reduction import check_combined, ordered_reduce

Ranks = tuple[int, ...]
"""World ranks, in the order in which they hold the pieces of a tensor."""

Shape = Sequence[int]
OPS = ("sum", "max", "min")
_CPU = torch.device("cpu")


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Return once it has ended."""
        ...


class Handle(Protocol):
    """A reduction under way; `wait()` gives its result and may be called once."""

    def wait(self) -> Tensor:
        """The result, once it is there."""
        ...


class Done:
    """A handle whose result is already there."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class Later:
    """A handle: `arriving` is waited for, and then `make` gives the result."""

    def __init__(self, arriving: Waitable, make: Callable[[], Any]) -> None:
        self._arriving, self._make = arriving, make

    @classmethod
    def of(cls, results: list[Tensor]) -> Later:
        """One whose results are already there."""
        return cls(Done(results[0]), lambda: results)

    def wait(self) -> Any:
        self._arriving.wait()
        return self._make()


@dataclass(frozen=True)
class Link:
    """What messages between ranks cost, and copies on one of them; None is not measured."""

    latency_s: float  # seconds that the smallest collective takes
    bytes_per_s: float  # bytes that a rank sends in a second
    copy_start_s: float | None = None  # seconds that the smallest local copy takes
    copy_bytes_per_s: float | None = None  # bytes that a rank copies in a second, within itself


class Transport(ABC):
    """Moves plain tensors between ranks.

    A transport that reaches other ranks by itself is a `CheckedTransport`; one around another
    transport is a `Wrapper`.
    `transports/default.py` says which one is in use.
    """

    records = False
    """Whether it notes what a program sends, so that no size may depend on values, but inside
    ``as_one``."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank in the world."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks in the world."""

    def rank_in(self, placement: Any) -> int:
        """The rank that this process is among those of ``placement``: its own. A simulated process
        may stand for another one in each placement."""
        return self.rank

    def device(self, kind: str) -> torch.device:
        """Where this process keeps its tensors of a placement on devices of this kind."""
        return _gpu(torch.cuda.current_device()) if kind == "cuda" else _CPU

    @abstractmethod
    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        """Start an `all_reduce`. `x` belongs to the transport until `wait()` has returned; after
        that its values are undefined. The result is what `wait()` returns."""

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
        """One batch of point-to-point messages: `sends` are (to, tensor), `receives` (from, shape,
        dtype). Returns the received tensors in the order of `receives`, on `device`.

        Between two ranks messages match in order; a rank may send to itself. No order of the
        lists can deadlock. Every rank of `ranks` must call, even with nothing to send or receive.
        """

    @abstractmethod
    def send(self, x: Tensor, to: int, label: str) -> Handle:
        """Start sending `x` to rank `to`, which receives it under the same `label`. `wait()`
        returns once `x` may be written to again; nobody has to call it for the message to go."""

    @abstractmethod
    def receive(
        self, shape: Shape, dtype: torch.dtype, source: int, label: str, device: torch.device | str
    ) -> Handle:
        """Start receiving what `source` sends under `label`; `wait()` gives the tensor.

        Messages between two ranks match by label, dtype and size, and in order where these are
        equal. So no order of sends and receives can deadlock, as long as nobody waits for a message
        before its sender has had what it needs to send it.
        """

    @abstractmethod
    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Every rank's `obj`, which must be picklable, in the order of `ranks`. For small metadata
        and checks."""

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        """Every rank's `note`, in the order of `ranks`. For notes that are nearly always empty:
        then a short message, which is always of one size, goes to each of the others."""
        return self.gather_objects(note, ranks)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        """Every note of `told`, of which `ranks` are some, and `all_reduce(x, ranks, op)`; None for
        it where there is a note. This rank has none: one that has calls `gather_notes`. A small `x`
        travels in the message of the notes, where that is faster."""
        notes = self.gather_notes(b"", told)
        return notes, None if any(notes) else self.all_reduce(x, ranks, op)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        """Whether `ranks` read each other's memory on devices of this kind ("cpu", "cuda"), tensors
        of `nbytes` at once. The first call for `ranks` is a collective of them."""
        return False

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        """Whether what is started between `ranks` travels while this rank computes, without a
        thread of the caller's. The first call for `ranks` is a collective of them."""
        return False

    def link(self, kind: str) -> Link | None:
        """What messages between ranks on devices of this kind cost, the same on every rank; None if
        it is not known. No rank waits for another."""
        return None

    def hosts_of(self, ranks: Ranks) -> tuple[int, ...] | None:
        """The host of each of `ranks`, as numbers in the order in which hosts first come; None if
        this rank does not know, as before it has communicated with them. No rank waits for another.
        """
        return None

    def bytes_by_messages(self) -> int:
        """Bytes that this rank has sent to ranks with which it shares no memory: those on other
        hosts, as a rule. What they send inside a host is not among them."""
        return 0

    def abandon(self, why: str) -> bool:
        """Make every other rank raise, because this one cannot go on in what they do together.
        False where there is nobody to tell: simulated ranks end with the first that raises."""
        return False

    def as_one(
        self, run: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor], ranks: Ranks
    ) -> list[Tensor]:
        """`run(xs)`, which sends by this interface among `ranks` as much as the values of `xs` say,
        while shapes of its results depend on those of `xs` alone. A transport that notes what a
        program sends takes it for one message. `repr(run)` says all else that it depends on."""
        return run(xs)

    # ---- built on those above; a transport may do them faster -----------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        """The elementwise `op` ("sum", "max", "min") of `x` over `ranks`: a new tensor, same bits
        on every rank. For bool, "sum" is or. Raises ValueError on another op."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        return self.all_reduce_async(x, ranks, op).wait()

    def join(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        """All ranks' `x`, joined along `dim`; `x` on `ranks[k]` has size `sizes[k]` there."""
        shapes = [resized(x.shape, dim, size) for size in sizes]
        out, slots = joinable(x, shapes, dim)
        pieces = self.all_gather(x, shapes, ranks, slots)
        return torch.cat(pieces, dim) if out is None else out

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        """The `op` of `x` over `ranks`, cut along `dim`: `ranks[k]` gets part k, of `sizes[k]`.

        This is an all-to-all of the parts, which are then combined in the order of `ranks`. It
        sends as many bytes as a reduce-scatter, and gives the same bits whichever rank holds a part
        and however the parts are cut.
        """
        check_op(op, x.dtype)
        own = sizes[check_member("reduce_scatter", self.rank, ranks)]
        shapes = [resized(x.shape, dim, own)] * len(ranks)
        return ordered_reduce(self.all_to_all(x.split(list(sizes), dim), shapes, ranks), op)

    def join_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """`join` of each of `xs`, which have one dtype, by its own dim and sizes; in one message
        where that is faster. `out` gives contiguous tensors to fill."""
        parts = [[resized(x.shape, d, s[k]) for x, d, s in zip(xs, dims, sizes, strict=True)]
                 for k in range(len(ranks))]  # fmt: skip
        if len(xs) > 1 and _are_small(xs, parts):
            flat = torch.cat([x.detach().reshape(-1) for x in xs])
            counts = [[math.prod(shape) for shape in shapes] for shapes in parts]
            arrived = self.all_gather(flat, [(sum(each),) for each in counts], ranks)
            cut = [
                [part.view(shape) for part, shape in zip(piece.split(each), shapes)]
                for piece, each, shapes in zip(arrived, counts, parts)
            ]
            made = [torch.cat([own[i] for own in cut], dim) for i, dim in enumerate(dims)]
        else:
            made = [self.join(x, d, s, ranks) for x, d, s in zip(xs, dims, sizes)]
        return made if out is None else [place.copy_(x) for place, x in zip(out, made)]

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        """`reduce_scatter` of each of `xs`, which have one dtype, by its own dim and sizes; in one
        message where that is faster."""
        check_op(op, xs[0].dtype)
        if len(xs) < 2 or not _are_small(xs, [[x.shape for x in xs]]):
            return [
                self.reduce_scatter(x, d, s, ranks, op)
                for x, d, s in zip(xs, dims, sizes, strict=True)
            ]
        me = check_member("reduce_scatter", self.rank, ranks, *xs)
        cut = [x.detach().split(list(s), d) for x, d, s in zip(xs, dims, sizes, strict=True)]
        pieces = [torch.cat([own[k].reshape(-1) for own in cut]) for k in range(len(ranks))]
        mine = [own[me] for own in cut]
        arrived = self.all_to_all(pieces, [pieces[me].shape] * len(ranks), ranks)
        total = ordered_reduce(arrived, op).split([x.numel() for x in mine])
        return [part.view(x.shape) for part, x in zip(total, mine)]

    def start_join_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> Later:
        """Start `join_several`; `wait()` gives its results. `xs` may not be written to before."""
        return Later.of(self.join_several(xs, dims, sizes, ranks))

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> Later:
        """Start `reduce_scatter_several`, a sum; `wait()` gives its results. `xs` may not be
        written to before."""
        return Later.of(self.reduce_scatter_several(xs, dims, sizes, ranks))

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> Later:
        """Start `all_to_all`; `wait()` gives its results. `pieces` may not be written to before."""
        return Later.of(self.all_to_all(pieces, shapes, ranks))

    def turn(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        """From parts along `concat_dim` to parts along `split_dim`, by an all-to-all.

        `split_sizes[k]` is the size of the part that `ranks[k]` gets, `concat_sizes[k]` that of the
        part that it held.
        """
        own = split_sizes[check_member("all_to_all", self.rank, ranks)]
        kept = resized(x.shape, split_dim, own)
        shapes = [resized(kept, concat_dim, size) for size in concat_sizes]
        out, slots = joinable(x, shapes, concat_dim)
        pieces = self.all_to_all(x.split(list(split_sizes), split_dim), shapes, ranks, slots)
        return torch.cat(pieces, concat_dim) if out is None else out

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        """Every rank's `x`, all of one shape, to be read inside the `with` block and not after it.

        Where the ranks share memory these are views of it, so that a kernel can read all of them in
        one pass. These ranks must not communicate otherwise inside the block.
        """
        return nullcontext(self.all_gather(x, [x.shape] * len(ranks), ranks))

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        """(tensors, start): added up in order, the tensors are a sum in which this rank's part,
        cut along `dim` by `sizes`, begins at index `start`. To be read inside the `with` block.

        By default it is the one tensor that `reduce_scatter` gives, and start is 0. A transport
        whose ranks read each other's memory faster than they reduce gives every rank's `x`, as in
        `peers`.
        """
        return nullcontext(([self.reduce_scatter(x, dim, sizes, ranks)], 0))


@lru_cache
def _gpu(index: int) -> torch.device:
    # Modes see `torch.device(...)`: one that records a program would give another.
    with torch._C.DisableTorchFunction():
        return torch.device("cuda", index)


def check_member(what: str, rank: int, ranks: Ranks, *tensors: Tensor) -> int:
    """The position of `rank` in `ranks`. Raises ValueError if it is not one of them, or if one of
    `tensors` is on `meta` or of a dtype that torch cannot copy."""
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
        if x.dtype in _NEVER_COPIED:
            raise ValueError(
                f"{what}: a tensor of {x.dtype} was given.\n  torch cannot copy its numbers.\n"
                "  Send them in another dtype, such as x.view(torch.uint8), or x.dequantize()."
            )
    return ranks.index(rank)


# Numbers of less than a byte, for which torch has no kernels, and those whose scale is elsewhere.
_NEVER_COPIED = frozenset(
    getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)
) | {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raises ValueError if `op` is not one of `OPS`, or if it cannot combine numbers of `dtype`."""
    if op not in OPS:
        raise ValueError(
            f"all_reduce: op={op!r} is not known.\n  Ranks combine by one of {OPS}.\n"
            "  For a mean, sum and then divide."
        )
    check_combined(dtype, op)


# Several tensors of at most so many bytes together are packed into one message: at 5 GB/s the copy
# takes less time than gloo's latency.
PACKED_BYTES = 1 << 20


def _are_small(xs: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]) -> bool:
    """Whether tensors of `shapes`, all like `xs`, are packed; the same on all ranks."""
    count = sum(math.prod(shape) for own in shapes for shape in own)
    return count * xs[0].element_size() <= PACKED_BYTES


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """`shape` with another size along `dim`."""
    shape = list(shape)
    shape[dim] = size
    return shape


def joinable(
    like: Tensor, shapes: Sequence[Sequence[int]], dim: int, out: Tensor | None = None
) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """A tensor that joins pieces of `shapes` along `dim`, and its slices to receive them into.
    It is the contiguous `out`, if that is given.

    The slices are contiguous only if all dims before `dim` have size 1. Otherwise the result is
    (None, None), and the caller joins the pieces by one more copy.
    """
    shape = shapes[0]
    if any(n != 1 for n in shape[: dim % len(shape)]):
        return None, None
    sizes = [piece[dim] for piece in shapes]
    if out is None:
        out = torch.empty(resized(shape, dim, sum(sizes)), dtype=like.dtype, device=like.device)
    return out, out.split(sizes, dim)
