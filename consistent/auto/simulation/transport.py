"""Transport of a simulated process: it sends nothing, and received tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import (
    Done,
    Handle,
    Later,
    Link,
    Ranks,
    Shape,
    Transport,
    check_op,
    outline,
    resized,
)
from mirrored.transports.counting import call_of
from mirrored.transports.torch_dist.transport import in_one_round

from ...spec import Placement

Empty = Callable[[Sequence[int], torch.dtype, int], Tensor]
Note = Callable[..., None]


class Simulated(Transport):
    """Transport under which one process takes the place of all ranks of a world.

    With ``rank`` the process is that rank. Without, in each placement it acts as the rank at the
    grid's origin, which has the largest shards.

    Args:
        size: number of ranks of the world.
        rank: the rank to be; None for one rank of each placement.
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
        self.size, self._fixed = size, rank is not None
        self.rank = rank or 0
        self._empty, self._holder, self._note = empty, holder, note
        self._links, self._shared = links, shared
        self._acts = False  # whether this process is inside ``acting_in``
        self._begun = 0
        self._stood_for = {self.rank}  # the ranks as which this process has acted

    # -- the rank as which this process acts -------------------------------------------------------

    def rank_in(self, placement: Any) -> int:
        """Return the rank as which this process acts in ``placement``."""
        if self._fixed or placement.coordinate_of(self.rank) is not None:
            return self.rank
        self._stood_for.add(placement.first_rank)
        return placement.first_rank

    def device(self, kind: str) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def acting_in(self, placement: Placement) -> Iterator[None]:
        """Make this process the rank that represents ``placement``, inside the ``with`` block."""
        before = self.rank, self._acts
        self.rank, self._acts = self.rank_in(placement), True
        try:
            yield
        finally:
            self.rank, self._acts = before

    def rank_with(self, tensors: Iterable[Tensor]) -> int:
        """Return the rank that works on plain tensors: the one that holds the first of them.

        For real tensors, and inside ``acting_in``, it is this process's rank.
        """
        if not self._acts:
            for x in tensors:
                if (found := self._holder(x)) is not None:
                    return found
        return self.rank

    def _me(self, ranks: Ranks, tensors: Iterable[Tensor] = ()) -> int:
        """Return as which of ``ranks`` this process sends ``tensors``.

        That is the rank that holds them, or this process's rank, or the first of ``ranks``.
        """
        found = self.rank_with(tensors)
        return found if found in ranks else self.rank if self.rank in ranks else ranks[0]

    def _sent(self, name: str, **given: Any) -> None:
        ranks = tuple(given["ranks"]) if "ranks" in given else (self.rank, given["to"])
        if len(ranks) > 1:
            self._sends(self._me(ranks, _data(given)), name, given)

    def _sends(self, rank: int, name: str, given: dict[str, Any]) -> None:
        call = call_of(rank, given, name)
        self._note(rank, call.name, call.bytes, call.ranks, tensors=call.tensors)

    def _begin(self, name: str, made: Any, arriving: list[Tensor], **given: Any) -> _UnderWay:
        """Log the begin of an asynchronous message, and return a work handle for it.

        ``wait()`` of the handle logs the end of the message.

        Args:
            name: the transport method.
            made: result of the message, which ``wait()`` returns.
            arriving: received tensors whose memory is held until ``wait()``.
            given: arguments of the method.
        """
        call = call_of(me := self._me(given["ranks"], _data(given)), given, name)
        self._begun += 1
        begin = {"start": self._begun, "tensors": call.tensors}
        self._note(me, call.name, call.bytes, call.ranks, **begin)
        end = partial(self._note, me, call.name, 0, call.ranks, wait=self._begun)
        return _UnderWay(made, end, arriving)

    # -- messages ----------------------------------------------------------------------------------

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        check_op(op, x.dtype)
        x = x.detach()
        if len(ranks) == 1 or x.numel() == 0:
            return Done(x)
        arriving = self._arriving(x, ranks)
        total = x if self._shared(ranks) else self._like(x, x.shape)
        return self._begin("all_reduce_async", total, arriving, x=x, ranks=ranks)

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        check_op(op, x.dtype)
        self._sent("all_reduce", x=x, ranks=ranks)
        arriving = self._arriving(x, ranks)
        total = self._like(x, x.shape)
        del arriving  # held until the total exists, for the peak of memory
        return total

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        self._sent("all_gather", x=x, shapes=shapes, ranks=ranks)
        return self._made(x, shapes, out)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        self._sent("all_to_all", pieces=pieces, shapes=shapes, ranks=ranks)
        return self._made(pieces[0], shapes, out)

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> Later:
        if len(ranks) == 1:
            return super().start_all_to_all(pieces, shapes, ranks)
        made = self._made(pieces[0], shapes, None)
        given = {"pieces": pieces, "shapes": shapes, "ranks": ranks}
        return Later(self._begin("start_all_to_all", made, [], **given), lambda: made)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        sent = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sent("broadcast", x=sent, source=source, ranks=ranks)
        return self._empty(shape, dtype, self._me(ranks))

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        given = {"sends": sends, "receives": receives, "ranks": ranks}
        if self._acts:
            self._sent("exchange", **given)
        elif len(ranks) > 1:  # each rank that this process acts as takes part in it
            sender = self._me(ranks, _data(given))
            for rank in sorted({sender, *self._stood_for.intersection(ranks)}):
                self._sends(rank, "exchange", given if rank == sender else given | {"sends": []})
        me = self._me(ranks) if ranks else self.rank
        return [self._empty(shape, dtype, me) for _, shape, dtype in receives]

    def send(self, x: Tensor, to: int, label: str) -> Handle:
        self._sent("send", x=x, to=to)
        return Done(outline(x))

    def receive(
        self, shape: Shape, dtype: torch.dtype, source: int, label: str, device: torch.device | str
    ) -> Handle:
        return Done(self._empty(shape, dtype, self.rank))

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        if len(ranks) > 1:  # each rank that this process acts as sends it
            for rank in sorted(self._stood_for.intersection(ranks)):
                call = call_of(rank, {"obj": obj, "ranks": ranks}, "gather_objects")
                self._note(rank, call.name, call.bytes, call.ranks)
        return [obj] * len(ranks)

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        if len(ranks) > 1:
            for rank in sorted(self._stood_for.intersection(ranks)):
                call = call_of(rank, {"note": note, "ranks": ranks}, "gather_notes")
                self._note(rank, call.name, call.bytes, call.ranks)
        return [note] * len(ranks)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        return [b""] * len(told), self.all_reduce(x, ranks, op)

    def link(self, kind: str) -> Link | None:
        return self._links(kind)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        return kind == "cpu" and self._shared(ranks)

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        return kind == "cpu" and not self._shared(ranks)

    # -- composed methods, each logged as one message ----------------------------------------------

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        self._sent("all_gather_into_tensor", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return self._like(x, resized(x.shape, dim, sum(sizes)))

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        self._sent("reduce_scatter", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return self._scattered([x], [dim], [sizes], ranks)[0]

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        self._sent("all_gather_several", xs=xs, dims=dims, sizes=sizes, ranks=ranks)
        return self._joined(xs, dims, sizes) if out is None else list(out)

    def start_all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> Later:
        if len(ranks) == 1:
            return super().start_all_gather_several(xs, dims, sizes, ranks)
        made = self._joined(xs, dims, sizes)
        given = {"xs": xs, "dims": dims, "sizes": sizes, "ranks": ranks}
        return Later(self._begin("start_all_gather_several", made, [], **given), lambda: made)

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        self._sent("reduce_scatter_several", xs=xs, dims=dims, sizes=sizes, ranks=ranks)
        return self._scattered(xs, dims, sizes, ranks)

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> Later:
        if len(ranks) == 1:
            return super().start_reduce_scatter_several(xs, dims, sizes, ranks)
        shapes, arriving = self._shares_of(xs, dims, sizes, ranks)
        given = {"xs": xs, "dims": dims, "sizes": sizes, "ranks": ranks}
        under_way = self._begin("start_reduce_scatter_several", None, arriving, **given)
        me = self._me(ranks, xs)
        of_sums = [(shape, x.dtype, me) for shape, x in zip(shapes, xs, strict=True)]
        return Later(under_way, lambda: [self._empty(*each) for each in of_sums])

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        given = {"split_dim": split_dim, "split_sizes": split_sizes}
        given |= {"concat_dim": concat_dim, "concat_sizes": concat_sizes}
        self._sent("all_to_all_single", x=x, ranks=ranks, **given)
        shape = resized(x.shape, split_dim, self._own(split_sizes, ranks))
        shape[concat_dim] = sum(concat_sizes)
        return self._like(x, shape)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        self._sent("peers", x=x, ranks=ranks)
        return nullcontext([self._like(x, x.shape) for _ in ranks])

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        self._sent("addends", x=x, dim=dim, sizes=sizes, ranks=ranks)
        return nullcontext(([self._like(x, resized(x.shape, dim, self._own(sizes, ranks)))], 0))

    # -- results -----------------------------------------------------------------------------------

    def _own(self, sizes: Sequence[int], ranks: Ranks) -> int:
        return sizes[ranks.index(self._me(ranks))]

    def _scattered(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> list[Tensor]:
        shapes, arriving = self._shares_of(xs, dims, sizes, ranks)
        made = [self._like(x, shape) for x, shape in zip(xs, shapes, strict=True)]
        del arriving  # held until the sums exist, for the peak of memory
        return made

    def _shares_of(
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
        each = zip(xs, dims, sizes, strict=True)
        shapes = [resized(x.shape, dim, self._own(own, ranks)) for x, dim, own in each]
        others = 0 if self._shared(ranks) else len(ranks) - 1
        pairs = zip(xs, shapes, strict=True)
        return shapes, [self._like(x, (others, *shape)) for x, shape in pairs if others]

    def _joined(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        each = zip(xs, dims, sizes, strict=True)
        return [self._like(x, resized(x.shape, dim, sum(own))) for x, dim, own in each]

    def _arriving(self, x: Tensor, ranks: Ranks) -> list[Tensor]:
        """Return a list with a tensor as large as what a real all-reduce receives before the total.

        It is empty if the ranks share memory. Otherwise each of the other ranks sends a part of its
        tensor, or all of it. The caller holds the list until the total exists, so that the
        simulated peak of memory is correct.
        """
        n = len(ranks)
        if n == 1 or self._shared(ranks):
            return []
        if in_one_round(self._links(x.device.type), x.nbytes, n):
            # n - 1 tensors arrive; the caller allocates one of them, as the total.
            return [self._like(x, (n - 2, *x.shape))]
        return [self._like(x, (n - 1, -(-x.numel() // n)))]

    def _like(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return self._empty(shape, x.dtype, self.rank_with((x,)))

    def _made(
        self, like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None
    ) -> list[Tensor]:
        return [self._like(like, shape) for shape in shapes] if out is None else list(out)


def _data(given: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a transport method; ``given`` has them by name."""
    if given.get("x") is not None:
        yield given["x"]
    yield from given.get("xs", given.get("pieces", ()))
    yield from (x for _, x in given.get("sends", ()))


class _UnderWay:
    """Work handle of an asynchronous message; ``wait()`` returns the result ``x``.

    ``wait()`` also logs the end of the message by ``end()``, and frees the tensors ``arriving``.
    """

    def __init__(self, x: Tensor, end: Callable[[], None], arriving: list[Tensor]) -> None:
        self._x, self._end, self._arriving = x, end, arriving

    def wait(self) -> Tensor:
        self._end()
        self._arriving.clear()
        return self._x
