"""Transport of a simulated process: it sends nothing, and received tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import (
    CompletedHandle,
    Handle,
    Link,
    PendingResult,
    Ranks,
    Shape,
    Transport,
    check_op,
    placeholder_like,
    resize_dim,
)
from mirrored.transports.counting import record_of
from mirrored.transports.torch_dist.transport import in_one_round

from ...spec import Placement

Empty = Callable[[Sequence[int], torch.dtype, int], Tensor]
Note = Callable[..., None]


class SimulatedTransport(Transport):
    """Transport under which one process takes the place of all ranks of a world.

    With ``rank`` the process is that rank. Without, in each placement it acts as the rank at the
    grid's origin, which has the largest shards.

    Args:
        size: number of ranks of the world.
        rank: the rank as which this process acts; None for one rank of each placement.
        empty: function of (shape, dtype, receiver) that makes a tensor without values, which
            arrived at the rank ``receiver``.
        holder: function that returns the rank that holds a tensor; None for real tensors.
        note: function called with the rank, name, bytes and ranks of each message.
        links: function of a device type that returns bandwidth and latency of messages.
        shared: function of ranks that returns whether they read each other's memory.
    """

    rank: Any = 0
    size: Any = 1

    def __init__(
        self,
        size: int,
        rank: int | None,
        empty: Empty,
        holder: Callable[[Tensor], int | None],
        note: Note,
        links: Callable[[str], Link],
        shared: Callable[[Ranks], bool],
    ) -> None:
        self.size, self._has_fixed_rank = size, rank is not None
        self.rank = rank or 0
        self._empty, self._holder_of, self._log_message = empty, holder, note
        self._links, self._shares_memory = links, shared
        self._is_acting = False  # whether this process is inside ``acting_in``
        self._async_count = 0
        self._acted_ranks = {self.rank}  # the ranks as which this process has acted

    # -- the rank as which this process acts -------------------------------------------------------

    def rank_in(self, placement: Any) -> int:
        """Return the rank as which this process acts in ``placement``."""
        if self._has_fixed_rank or placement.coordinate_of(self.rank) is not None:
            return self.rank
        self._acted_ranks.add(placement.first_rank)
        return placement.first_rank

    def device(self, kind: str) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def acting_in(self, placement: Placement) -> Iterator[None]:
        """Make this process the rank that represents ``placement``, inside the ``with`` block."""
        saved = self.rank, self._is_acting
        self.rank, self._is_acting = self.rank_in(placement), True
        try:
            yield
        finally:
            self.rank, self._is_acting = saved

    def rank_with(self, tensors: Iterable[Tensor]) -> int:
        """Return the rank that works on plain tensors: the one that holds the first of them.

        For real tensors, and inside ``acting_in``, it is this process's rank.
        """
        if not self._is_acting:
            for x in tensors:
                if (holder := self._holder_of(x)) is not None:
                    return holder
        return self.rank

    def _acting_rank(self, ranks: Ranks, tensors: Iterable[Tensor] = ()) -> int:
        """Return the one of ``ranks`` as which this process sends ``tensors``.

        That is the rank that holds them, or this process's rank, or the first of ``ranks``.
        """
        rank = self.rank_with(tensors)
        return rank if rank in ranks else self.rank if self.rank in ranks else ranks[0]

    def _log_call(self, name: str, **arguments: Any) -> None:
        ranks = tuple(arguments["ranks"]) if "ranks" in arguments else (self.rank, arguments["to"])
        if len(ranks) > 1:
            self._log_call_of(
                self._acting_rank(ranks, _tensor_arguments(arguments)), name, arguments
            )

    def _log_call_of(self, rank: int, name: str, arguments: dict[str, Any]) -> None:
        call = record_of(rank, arguments, name)
        self._log_message(rank, call.name, call.bytes, call.ranks, tensors=call.tensors)

    def _begin_async(
        self, name: str, result: Any, arriving: list[Tensor], **arguments: Any
    ) -> _AsyncMessage:
        """Log the begin of an asynchronous message, and return a work handle for it.

        ``wait()`` of the handle logs the end of the message.

        Args:
            name: the transport method.
            result: result of the message, which ``wait()`` returns.
            arriving: received tensors whose memory is held until ``wait()``.
            arguments: arguments of the method.
        """
        call = record_of(
            rank := self._acting_rank(arguments["ranks"], _tensor_arguments(arguments)),
            arguments,
            name,
        )
        self._async_count += 1
        begin = {"start": self._async_count, "tensors": call.tensors}
        self._log_message(rank, call.name, call.bytes, call.ranks, **begin)
        end = partial(self._log_message, rank, call.name, 0, call.ranks, wait=self._async_count)
        return _AsyncMessage(result, end, arriving)

    # -- messages ----------------------------------------------------------------------------------

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        check_op(op, x.dtype)
        x = x.detach()
        if len(ranks) == 1 or x.numel() == 0:
            return CompletedHandle(x)
        arriving = self._arriving_tensors(x, ranks)
        total = x if self._shares_memory(ranks) else self._empty_like(x, x.shape)
        return self._begin_async("all_reduce_async", total, arriving, x=x, ranks=ranks)

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        check_op(op, x.dtype)
        self._log_call("all_reduce", x=x, ranks=ranks)
        arriving = self._arriving_tensors(x, ranks)
        total = self._empty_like(x, x.shape)
        del arriving  # held until the total exists, for the peak of memory
        return total

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        self._log_call("all_gather", x=x, shapes=shapes, ranks=ranks)
        return self._results(x, shapes, out)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        self._log_call("all_to_all", pieces=pieces, shapes=shapes, ranks=ranks)
        return self._results(pieces[0], shapes, out)

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> PendingResult:
        if len(ranks) == 1:
            return super().start_all_to_all(pieces, shapes, ranks)
        results = self._results(pieces[0], shapes, None)
        arguments = {"pieces": pieces, "shapes": shapes, "ranks": ranks}
        return PendingResult(
            self._begin_async("start_all_to_all", results, [], **arguments), lambda: results
        )

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        payload = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._log_call("broadcast", x=payload, source=source, ranks=ranks)
        return self._empty(shape, dtype, self._acting_rank(ranks))

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        arguments = {"sends": sends, "receives": receives, "ranks": ranks}
        if self._is_acting:
            self._log_call("exchange", **arguments)
        elif len(ranks) > 1:  # each rank that this process acts as takes part in it
            sender = self._acting_rank(ranks, _tensor_arguments(arguments))
            for rank in sorted({sender, *self._acted_ranks.intersection(ranks)}):
                self._log_call_of(
                    rank, "exchange", arguments if rank == sender else arguments | {"sends": []}
                )
        receiver = self._acting_rank(ranks) if ranks else self.rank
        return [self._empty(shape, dtype, receiver) for _, shape, dtype in receives]

    def send(self, x: Tensor, to: int, label: str) -> Handle:
        self._log_call("send", x=x, to=to)
        return CompletedHandle(placeholder_like(x))

    def receive(
        self, shape: Shape, dtype: torch.dtype, source: int, label: str, device: torch.device | str
    ) -> Handle:
        return CompletedHandle(self._empty(shape, dtype, self.rank))

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        if len(ranks) > 1:  # each rank that this process acts as sends it
            for rank in sorted(self._acted_ranks.intersection(ranks)):
                call = record_of(rank, {"obj": obj, "ranks": ranks}, "gather_objects")
                self._log_message(rank, call.name, call.bytes, call.ranks)
        return [obj] * len(ranks)

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        if len(ranks) > 1:
            for rank in sorted(self._acted_ranks.intersection(ranks)):
                call = record_of(rank, {"note": note, "ranks": ranks}, "gather_notes")
                self._log_message(rank, call.name, call.bytes, call.ranks)
        return [note] * len(ranks)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        return [b""] * len(told), self.all_reduce(x, ranks, op)

    def link(self, kind: str) -> Link | None:
        return self._links(kind)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        return kind == "cpu" and self._shares_memory(ranks)

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        return kind == "cpu" and not self._shares_memory(ranks)

    # -- composed methods, each logged as one message ----------------------------------------------

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        self._log_call("all_gather_into_tensor", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return self._empty_like(x, resize_dim(x.shape, dim, sum(sizes)))

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        self._log_call("reduce_scatter", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return self._scattered_results([x], [dim], [sizes], ranks)[0]

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        self._log_call("all_gather_several", xs=xs, dims=dims, sizes=sizes, ranks=ranks)
        return self._gathered_results(xs, dims, sizes) if out is None else list(out)

    def start_all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if len(ranks) == 1:
            return super().start_all_gather_several(xs, dims, sizes, ranks)
        results = self._gathered_results(xs, dims, sizes)
        arguments = {"xs": xs, "dims": dims, "sizes": sizes, "ranks": ranks}
        return PendingResult(
            self._begin_async("start_all_gather_several", results, [], **arguments), lambda: results
        )

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        self._log_call("reduce_scatter_several", xs=xs, dims=dims, sizes=sizes, ranks=ranks)
        return self._scattered_results(xs, dims, sizes, ranks)

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if len(ranks) == 1:
            return super().start_reduce_scatter_several(xs, dims, sizes, ranks)
        shapes, arriving = self._shapes_and_arriving(xs, dims, sizes, ranks)
        arguments = {"xs": xs, "dims": dims, "sizes": sizes, "ranks": ranks}
        message = self._begin_async("start_reduce_scatter_several", None, arriving, **arguments)
        rank = self._acting_rank(ranks, xs)
        sum_specs = [(shape, x.dtype, rank) for shape, x in zip(shapes, xs, strict=True)]
        return PendingResult(message, lambda: [self._empty(*sum_spec) for sum_spec in sum_specs])

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        arguments = {"split_dim": split_dim, "split_sizes": split_sizes}
        arguments |= {"concat_dim": concat_dim, "concat_sizes": concat_sizes}
        self._log_call("all_to_all_single", x=x, ranks=ranks, **arguments)
        shape = resize_dim(x.shape, split_dim, self._own_size(split_sizes, ranks))
        shape[concat_dim] = sum(concat_sizes)
        return self._empty_like(x, shape)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        self._log_call("peers", x=x, ranks=ranks)
        return nullcontext([self._empty_like(x, x.shape) for _ in ranks])

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        self._log_call("addends", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return nullcontext(
            ([self._empty_like(x, resize_dim(x.shape, dim, self._own_size(sizes, ranks)))], 0)
        )

    # -- results -----------------------------------------------------------------------------------

    def _own_size(self, sizes: Sequence[int], ranks: Ranks) -> int:
        return sizes[ranks.index(self._acting_rank(ranks))]

    def _scattered_results(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> list[Tensor]:
        shapes, arriving = self._shapes_and_arriving(xs, dims, sizes, ranks)
        sums = [self._empty_like(x, shape) for x, shape in zip(xs, shapes, strict=True)]
        del arriving  # held until the sums exist, for the peak of memory
        return sums

    def _shapes_and_arriving(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Return (shapes of this rank's results, received tensors) of a reduce-scatter of ``xs``.

        Addends are received only if the ranks do not share memory, here in one tensor for all other
        ranks. The caller holds it until the results exist, so that the simulated peak of memory is
        correct.
        """
        operands = zip(xs, dims, sizes, strict=True)
        shapes = [
            resize_dim(x.shape, dim, self._own_size(rank_sizes, ranks))
            for x, dim, rank_sizes in operands
        ]
        count = 0 if self._shares_memory(ranks) else len(ranks) - 1
        pairs = zip(xs, shapes, strict=True)
        return shapes, [self._empty_like(x, (count, *shape)) for x, shape in pairs if count]

    def _gathered_results(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        operands = zip(xs, dims, sizes, strict=True)
        return [
            self._empty_like(x, resize_dim(x.shape, dim, sum(rank_sizes)))
            for x, dim, rank_sizes in operands
        ]

    def _arriving_tensors(self, x: Tensor, ranks: Ranks) -> list[Tensor]:
        """Return a list with a tensor as large as what a real all-reduce receives before the total.

        It is empty if the ranks share memory. Otherwise each of the other ranks sends a part of its
        tensor, or all of it. The caller holds the list until the total exists, so that the
        simulated peak of memory is correct.
        """
        n = len(ranks)
        if n == 1 or self._shares_memory(ranks):
            return []
        if in_one_round(self._links(x.device.type), x.nbytes, n):
            # n - 1 tensors arrive; the caller allocates one of them, as the total.
            return [self._empty_like(x, (n - 2, *x.shape))]
        return [self._empty_like(x, (n - 1, -(-x.numel() // n)))]

    def _empty_like(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return self._empty(shape, x.dtype, self.rank_with((x,)))

    def _results(
        self, like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None
    ) -> list[Tensor]:
        return [self._empty_like(like, shape) for shape in shapes] if out is None else list(out)


def _tensor_arguments(arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a transport method, given by name."""
    if arguments.get("x") is not None:
        yield arguments["x"]
    yield from arguments.get("xs", arguments.get("pieces", ()))
    yield from (x for _, x in arguments.get("sends", ()))


class _AsyncMessage:
    """Work handle of an asynchronous message; ``wait()`` returns the result ``x``.

    ``wait()`` also logs the end of the message by ``end()``, and frees the tensors ``arriving``.
    """

    def __init__(self, x: Tensor, end: Callable[[], None], arriving: list[Tensor]) -> None:
        self._result, self._end, self._arriving_tensors = x, end, arriving

    def wait(self) -> Tensor:
        self._end()
        self._arriving_tensors.clear()
        return self._result
