"""Interface of all transports: they move plain tensors between ranks, without autograd.

``ranks`` is always an ordered tuple of world ranks, and piece k belongs to ``ranks[k]``. All
members of ``ranks`` make the same calls in the same order; no other rank calls.

Invariants, kept by all transports:

* a group of one rank never communicates;
* results never share memory with the inputs (except ``all_reduce_async``, which may work in place);
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

from .old_names import OldNames
from .reduction import check_reducible, ordered_reduce

Ranks = tuple[int, ...]
"""World ranks of a group: ``ranks[k]`` holds piece k of a tensor."""

Shape = Sequence[int]
OPS = ("sum", "max", "min")
_CPU = torch.device("cpu")


class Waitable(Protocol):
    """Protocol of a started operation, such as the sending of messages, that can be waited for."""

    def wait(self) -> Any:
        """Block until the operation has ended."""
        ...


class Handle(Protocol):
    """Protocol of a started operation that yields a tensor; ``wait()`` may be called once."""

    def wait(self) -> Tensor:
        """Block until the result is ready, and return it."""
        ...


class CompletedHandle:
    """Handle of an operation that has already ended: ``wait()`` returns ``result`` at once.

    Transports return it where the result is there at once, for example in a group of one rank.
    """

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class PendingResult:
    """Handle whose ``wait()`` calls ``transfer.wait()`` and then returns ``make_result()``.

    ``transfer`` is started already. ``make_result`` builds the result from what was received, for
    example by summing the pieces.
    """

    def __init__(self, transfer: Waitable, make_result: Callable[[], Any]) -> None:
        self._transfer, self._make_result = transfer, make_result

    @classmethod
    def completed(cls, results: list[Tensor]) -> PendingResult:
        """Return a handle of an operation that has already ended: ``wait()`` returns ``results``.

        ``results`` must not be empty.
        """
        return cls(CompletedHandle(results[0]), lambda: results)

    def wait(self) -> Any:
        self._transfer.wait()
        return self._make_result()


@dataclass(frozen=True)
class Link:
    """Measured cost of messages between ranks and of local copies.

    Costs of collectives are estimated from it, to choose among ways to compute the same result.
    The two fields about copies are None if copies were not measured.
    """

    latency_s: float  # seconds that the smallest collective takes
    bytes_per_s: float  # bytes that a rank sends in a second
    copy_start_s: float | None = None  # seconds that the smallest local copy takes
    copy_bytes_per_s: float | None = None  # bytes that a rank copies in a second, within itself


class Transport(OldNames, ABC):
    """Base class of everything that moves plain tensors between ranks.

    A transport that reaches other ranks on its own is a ``CheckedTransport``; one around another
    transport is a ``Wrapper``. ``transports/default.py`` decides which transport is in use.
    """

    records = False
    """Whether this transport records the program's messages to replay them. If so, the sizes of
    messages may depend on values only inside ``as_one``."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process in the world."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks in the world."""

    def rank_in(self, placement: Any) -> int:
        """Return the rank as which this process takes part in ``placement``.

        It is ``self.rank``, except in a simulation where one process stands for a rank of each
        placement.
        """
        return self.rank

    def device(self, kind: str) -> torch.device:
        """Return this process's device for tensors on placements whose device type is ``kind``."""
        return _gpu(torch.cuda.current_device()) if kind == "cuda" else _CPU

    @abstractmethod
    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        """Start an ``all_reduce`` and return its handle; ``wait()`` returns the result.

        The caller must not read or write ``x`` until ``wait()`` has returned, and its values are
        undefined after that, because the reduction may run in place.
        """

    @abstractmethod
    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Gather every rank's ``x``: piece k has shape ``shapes[k]`` and comes from ``ranks[k]``.

        ``out`` gives contiguous tensors to fill (for example slices of one tensor) instead of new
        ones.
        """

    @abstractmethod
    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Send ``pieces[k]`` to ``ranks[k]`` and return what each rank sent here.

        Piece k of the result has shape ``shapes[k]`` and comes from ``ranks[k]``. ``out`` gives
        contiguous tensors to fill and return instead of new ones.
        """

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
        """Return the ``x`` of world rank ``source`` as a new tensor on every rank.

        The result has ``shape`` and ``dtype`` and is on ``device``. ``x`` is read on the source
        only.
        """

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        """Send and receive one batch of point-to-point messages.

        ``sends`` are (to, tensor), ``receives`` are (from, shape, dtype). Returns the received
        tensors in the order of ``receives``, on ``device``. Between two ranks messages match in
        order; a rank may send to itself. No order of the lists can deadlock. Every member of
        ``ranks`` must call, even with nothing to send or receive.
        """

    @abstractmethod
    def send(self, x: Tensor, to: int, label: str) -> Handle:
        """Start sending ``x`` to rank ``to``, which receives it under the same ``label``.

        ``wait()`` returns once ``x`` may be overwritten. The message is sent even if nobody calls
        ``wait()``. The handle does not hold ``x``, so that a program may keep the handles of many
        messages.
        """

    @abstractmethod
    def receive(
        self, shape: Shape, dtype: torch.dtype, source: int, label: str, device: torch.device | str
    ) -> Handle:
        """Start receiving what ``source`` sends under ``label``; ``wait()`` returns the tensor.

        Messages between two ranks match by label, dtype and size, and in order where these are
        equal. So no order of sends and receives can deadlock, as long as nobody waits for a message
        before its sender has received what it needs to send it.
        """

    @abstractmethod
    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Gather every rank's picklable ``obj``, in the order of ``ranks``.

        Meant for small metadata and checks.
        """

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        """Gather every rank's ``note``, in the order of ``ranks``.

        A note is bytes for the other ranks, such as a pickled error, and is nearly always empty. If
        all of them are, a transport may send just one short message of a fixed size to each other
        rank.
        """
        return self.gather_objects(note, ranks)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        """All-reduce ``x`` over ``ranks``, unless a rank of ``told`` has a note (such as an error).

        So a rank that failed can report it instead of its ``x``, and no rank waits in vain. A rank
        calls this if its own note is empty; a rank with a note calls ``gather_notes`` over ``told``
        instead. A small ``x`` travels in the same message as the notes, where that is faster.

        Args:
            x: this rank's tensor.
            ranks: the ranks of the all-reduce, a subset of ``told``.
            told: the ranks that exchange notes.
            op: "sum", "max" or "min".

        Returns:
            (the notes of ``told``, the result of ``all_reduce(x, ranks, op)``). If any rank has a
            note, the second is None.
        """
        notes = self.gather_notes(b"", told)
        return notes, None if any(notes) else self.all_reduce(x, ranks, op)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        """Return whether ``ranks`` can read each other's memory, for tensors of ``nbytes`` at once.

        ``kind`` is the kind of device ("cpu", "cuda"). The first call for ``ranks`` is a collective
        over them.
        """
        return False

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        """Return whether started operations progress while this rank computes.

        If not, a caller that wants overlap must run them in a thread of its own. ``kind`` is the
        kind of device ("cpu", "cuda"). The first call for ``ranks`` is a collective over them.
        """
        return False

    def link(self, kind: str) -> Link | None:
        """Return the cost of messages between devices of type ``kind``; None if unknown.

        It is the same on every rank, so that all of them make the same decisions from it, for
        example how to change a tensor's layout. Does not block on other ranks.
        """
        return None

    def hosts_of(self, ranks: Ranks) -> tuple[int, ...] | None:
        """Return the host of each of ``ranks``, numbered by first appearance; None if unknown.

        For ranks on the hosts a, b, a it is ``(0, 1, 0)``. A rank does not know hosts before it has
        communicated with ``ranks``. Does not block on other ranks.
        """
        return None

    def bytes_by_messages(self) -> int:
        """Return how many bytes this rank has sent by messages (sockets).

        Usually these went to ranks on other hosts. What ranks of one host pass to each other
        through shared memory does not count.
        """
        return 0

    def abandon(self, why: str) -> bool:
        """Make every other rank raise an error with text ``why``: this rank cannot continue.

        Returns whether the other ranks were told. By default nobody is told and the result is
        False; simulated ranks, for example, all end when one of them raises.
        """
        return False

    def as_one(
        self, run: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor], ranks: Ranks
    ) -> list[Tensor]:
        """Return ``run(xs)``; a transport that records the program records the call as a whole.

        A recording transport (``records``) can only replay messages whose sizes do not depend on
        values. It replays this call by calling ``run`` again.

        Args:
            run: communicates among ``ranks``. The bytes that it sends may depend on the values of
                ``xs``, but the shapes of its results depend on the shapes of ``xs`` alone.
                ``repr(run)`` identifies everything else that its results depend on.
            xs: the inputs of ``run``.
            ranks: the ranks that make this call.
        """
        return run(xs)

    # ---- built on those above; a transport may do them faster -----------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        """Return the elementwise ``op`` of ``x`` over ``ranks`` as a new tensor.

        Every rank gets the same bits. ``op`` is "sum", "max" or "min"; for bool, "sum" is a logical
        or. Raises ValueError for another ``op``.
        """
        # `all_reduce_async` may overwrite its input, so it works on a copy.
        x = x.detach().clone(memory_format=torch.contiguous_format)
        return self.all_reduce_async(x, ranks, op).wait()

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        """Return all ranks' ``x`` concatenated along ``dim``, in the order of ``ranks``.

        This is an all-gather. The ``x`` of ``ranks[k]`` has size ``sizes[k]`` along ``dim``.
        """
        shapes = [resize_dim(x.shape, dim, size) for size in sizes]
        out, slots = concat_output(x, shapes, dim)
        pieces = self.all_gather(x, shapes, ranks, slots)
        return torch.cat(pieces, dim) if out is None else out

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        """Reduce ``x`` over ``ranks`` by ``op``, and return this rank's part along ``dim``.

        ``ranks[k]`` gets part k, of size ``sizes[k]``. This is an all-to-all of the parts, which
        each rank then combines in the order of ``ranks``. It sends as many bytes as a ring
        reduce-scatter, and the bits of a part do not depend on which rank gets it or on ``sizes``.
        """
        check_op(op, x.dtype)
        own_size = sizes[check_member("reduce_scatter", self.rank, ranks)]
        shapes = [resize_dim(x.shape, dim, own_size)] * len(ranks)
        return ordered_reduce(self.all_to_all(x.split(list(sizes), dim), shapes, ranks), op)

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return ``[all_gather_into_tensor(x, d, s, ranks) for x, d, s in zip(xs, dims, sizes)]``.

        The tensors travel in one message where that is faster. All of ``xs`` have one dtype.
        ``out`` gives contiguous tensors to fill and return instead of new ones.
        """
        parts = [[resize_dim(x.shape, d, s[k]) for x, d, s in zip(xs, dims, sizes, strict=True)]
                 for k in range(len(ranks))]  # fmt: skip
        if len(xs) > 1 and _are_small(xs, parts):
            flat = torch.cat([x.detach().reshape(-1) for x in xs])
            counts = [[math.prod(shape) for shape in shapes] for shapes in parts]
            # One flat message per rank; each is cut back into the pieces of the tensors by their
            # sizes.
            messages = self.all_gather(flat, [(sum(numels),) for numels in counts], ranks)
            pieces_by_rank = [
                [part.view(shape) for part, shape in zip(piece.split(numels), shapes)]
                for piece, numels, shapes in zip(messages, counts, parts)
            ]
            results = [
                torch.cat([pieces[i] for pieces in pieces_by_rank], dim)
                for i, dim in enumerate(dims)
            ]
        else:
            results = [
                self.all_gather_into_tensor(x, d, s, ranks) for x, d, s in zip(xs, dims, sizes)
            ]
        return results if out is None else [place.copy_(x) for place, x in zip(out, results)]

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        """Return ``[reduce_scatter(x, d, s, ranks, op) for x, d, s in zip(xs, dims, sizes)]``.

        The tensors travel in one message where that is faster. All of ``xs`` have one dtype.
        """
        check_op(op, xs[0].dtype)
        if len(xs) < 2 or not _are_small(xs, [[x.shape for x in xs]]):
            return [
                self.reduce_scatter(x, d, s, ranks, op)
                for x, d, s in zip(xs, dims, sizes, strict=True)
            ]
        position = check_member("reduce_scatter", self.rank, ranks, *xs)
        parts_by_tensor = [
            x.detach().split(list(s), d) for x, d, s in zip(xs, dims, sizes, strict=True)
        ]
        pieces = [
            torch.cat([parts[k].reshape(-1) for parts in parts_by_tensor])
            for k in range(len(ranks))
        ]
        own_parts = [parts[position] for parts in parts_by_tensor]
        received = self.all_to_all(pieces, [pieces[position].shape] * len(ranks), ranks)
        total = ordered_reduce(received, op).split([x.numel() for x in own_parts])
        return [part.view(x.shape) for part, x in zip(total, own_parts)]

    def start_all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        """Start ``all_gather_several``; ``wait()`` returns its results.

        ``xs`` must not be overwritten before ``wait()`` has returned.
        """
        return PendingResult.completed(self.all_gather_several(xs, dims, sizes, ranks))

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        """Start ``reduce_scatter_several`` with a sum; ``wait()`` returns its results.

        ``xs`` must not be overwritten before ``wait()`` has returned.
        """
        return PendingResult.completed(self.reduce_scatter_several(xs, dims, sizes, ranks))

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> PendingResult:
        """Start ``all_to_all``; ``wait()`` returns its results.

        ``pieces`` must not be overwritten before ``wait()`` has returned.
        """
        return PendingResult.completed(self.all_to_all(pieces, shapes, ranks))

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        """Turn shards along ``concat_dim`` into shards along ``split_dim``, by an all-to-all.

        ``split_sizes[k]`` is the size along ``split_dim`` of the shard that ``ranks[k]`` gets;
        ``concat_sizes[k]`` is the size along ``concat_dim`` of the shard that it held before.
        """
        own_size = split_sizes[check_member("all_to_all", self.rank, ranks)]
        own_shape = resize_dim(x.shape, split_dim, own_size)
        shapes = [resize_dim(own_shape, concat_dim, size) for size in concat_sizes]
        out, slots = concat_output(x, shapes, concat_dim)
        pieces = self.all_to_all(x.split(list(split_sizes), split_dim), shapes, ranks, slots)
        return torch.cat(pieces, concat_dim) if out is None else out

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        """Return a context manager that yields every rank's ``x``, so that a kernel can read all.

        The tensors, all of one shape, may be read inside the block only. Where the ranks share
        memory they are views into it, and nothing is gathered into a copy. The ranks must not
        communicate otherwise inside the block.
        """
        return nullcontext(self.all_gather(x, [x.shape] * len(ranks), ranks))

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        """Return a context manager that yields a reduce-scatter's addends before they are summed.

        A caller uses it to fuse the sum into its own kernel. It yields (tensors, start). The
        result of ``reduce_scatter(x, dim, sizes, ranks)`` is ``sum(tensors)``, added in order,
        from index ``start`` along ``dim`` on, in the size that ``sizes`` gives for this rank. The
        tensors may be read inside the block only.

        By default there is one tensor, the result of ``reduce_scatter``, and start is 0. A
        transport whose ranks read each other's memory faster than they reduce yields every rank's
        ``x``, as ``peers`` does.
        """
        return nullcontext(([self.reduce_scatter(x, dim, sizes, ranks)], 0))


@lru_cache
def _gpu(index: int) -> torch.device:
    # Torch function modes see `torch.device(...)`, and a mode that records a program would replace
    # the result.
    with torch._C.DisableTorchFunction():
        return torch.device("cuda", index)


def check_member(what: str, rank: int, ranks: Ranks, *tensors: Tensor) -> int:
    """Return the position of ``rank`` in ``ranks``; ``what`` names the call in errors.

    Raises ValueError if ``rank`` is not a member, or if one of ``tensors`` is on ``meta`` or has a
    dtype that torch cannot copy.
    """
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
        if x.dtype in _UNCOPYABLE_DTYPES:
            raise ValueError(
                f"{what}: a tensor of {x.dtype} was given.\n  torch cannot copy its numbers.\n"
                "  Send them in another dtype, such as x.view(torch.uint8), or x.dequantize()."
            )
    return ranks.index(rank)


# Dtypes of less than a byte, for which torch has no kernels, and quantized dtypes, whose scale is
# not part of the data.
_UNCOPYABLE_DTYPES = frozenset(
    getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)
) | {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError if ``op`` is not one of ``OPS`` or cannot combine numbers of ``dtype``."""
    if op not in OPS:
        raise ValueError(
            f"all_reduce: op={op!r} is not known.\n  Ranks combine by one of {OPS}.\n"
            "  For a mean, sum and then divide."
        )
    check_reducible(dtype, op)


# Several tensors of at most this many bytes together are packed into one message: at 5 GB/s the
# copy takes less time than gloo's latency.
PACKED_BYTES = 1 << 20


def _are_small(xs: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]) -> bool:
    """Return whether tensors are small enough to be packed into one message; the same on all ranks.

    ``shapes`` are the shapes of all tensors that the ranks send, grouped by rank; the dtype is that
    of ``xs[0]``.
    """
    count = sum(math.prod(shape) for own in shapes for shape in own)
    return count * xs[0].element_size() <= PACKED_BYTES


def placeholder_like(x: Tensor) -> Tensor:
    """Return a tensor of the shape, dtype and device of ``x`` in the memory of one element.

    A send's ``wait()`` returns it: callers can read the shape of what was sent, and the sent tensor
    is not kept alive.
    """
    return x.new_empty(()).expand(x.shape)


def resize_dim(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return ``shape`` with ``size`` in place of its size along ``dim``."""
    shape = list(shape)
    shape[dim] = size
    return shape


def concat_output(
    like: Tensor, shapes: Sequence[Sequence[int]], dim: int, out: Tensor | None = None
) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """Return a tensor to hold the concatenation of pieces, and its slices to receive them into.

    Pieces received into the slices need no ``torch.cat``. The result is (None, None) if a dim
    before ``dim`` is not of size 1: the slices would not be contiguous, and the caller must
    concatenate.

    Args:
        like: has the dtype and device for a new tensor.
        shapes: the shape of each piece.
        dim: the dim along which pieces are concatenated.
        out: a contiguous tensor to use instead of a new one.
    """
    shape = shapes[0]
    if any(n != 1 for n in shape[: dim % len(shape)]):
        return None, None
    sizes = [piece[dim] for piece in shapes]
    if out is None:
        out = torch.empty(resize_dim(shape, dim, sum(sizes)), dtype=like.dtype, device=like.device)
    return out, out.split(sizes, dim)
