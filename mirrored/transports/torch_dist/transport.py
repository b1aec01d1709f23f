"""Transport between processes of torch.distributed; the only file that calls its collectives.

CPU tensors are sent by our own sockets (``sockets.py``), CUDA tensors by NCCL; without NCCL, CUDA
tensors are staged on the CPU.

By sockets, all collectives are batches of sends and receives. They send exactly the bytes needed,
for uneven pieces too, skip empty pieces, and need no buffers to join and no group. NCCL needs all
ranks of a group in its first call, so there everything is a collective on a group.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ...comm import (
    CompletedHandle,
    Handle,
    Link,
    PendingResult,
    Ranks,
    Shape,
    Transport,
    Waitable,
    check_member,
    check_op,
)
from ...reduction import WIDER_DTYPES, ordered_reduce
from ..base.unseen import hidden_from_modes
from ..failures import methods_count_out_of_memory
from ..faults.watch import Watch
from ..tuning import between
from ..tuning.table import Table
from . import messages, several, short
from .described import DescribedCalls, current_call, describe_call, resume_call
from .groups import GroupState, timeout, world
from .messages import as_bytes

# Gloo's own all-reduce is not used: it takes longer at every size (two ranks in two network
# namespaces, µs, gloo's and ours: 80 B 334 34, 64 KiB 478 65, 256 KiB 498 82, 1.3 MB 1377 612,
# 4 MiB 4313 3491), adds up in the order of its ring, so that bits depend on the number of ranks,
# and compares no calls.

# In an all-reduce by messages every rank sends all of x to all others, in one round, if that sends
# at most this many bytes more than two rounds, a reduce-scatter and a gather. If the link was not
# measured, the limit is what a rank sends in 30 us at 1.5 GB/s.
_DEFAULT_LINK = Link(30e-6, 1.5e9)


@methods_count_out_of_memory
class TorchDist(DescribedCalls):
    """Transport between the ranks of torch.distributed's default process group.

    Without a process group this process is rank 0 of 1.
    """

    def __init__(self) -> None:
        self._last_two_round: Callable[[], _TwoRoundAllReduce | None] = lambda: None  # weak
        self._links: weakref.WeakKeyDictionary[GroupState, Link] = weakref.WeakKeyDictionary()

    @property
    def rank(self) -> int:
        return world().rank

    @property
    def size(self) -> int:
        return world().size

    def world(self) -> dist.ProcessGroup | None:
        """Return the default process group; None in a child of a rank.

        If a launcher such as torchrun started this process, the group is initialized first.
        """
        return None if world().is_child else c10d.GroupMember.WORLD

    @property
    def has_nccl(self) -> bool:
        """True if tensors on GPUs are sent by NCCL, and not through main memory."""
        return world().uses_nccl

    @property
    def may_measure(self) -> bool:
        """True if ranks may measure whether shared memory or messages are faster."""
        return world().may_measure

    @property
    def gpus_may_lose_ranks(self) -> bool:
        """True if this process goes on in another process group when ranks are lost.

        Then GPUs send messages by NCCL, from which they can be released, and share no memory.
        """
        return world().overdue is not None

    def timeout_s(self) -> float:
        """Return how many seconds a rank waits for others."""
        return timeout("cpu").total_seconds()

    def agreed(self, name: str, make: Callable[[], str]) -> str:
        """Return a text that is the same on all ranks: that of the rank that requests it first.

        All ranks get the result of ``make()`` of the rank that first requests ``name``. No rank
        waits for another.
        """
        return world().agreed(name, make)

    @property
    def watch(self) -> Watch:
        """The object that makes all ranks raise if one waits in vain.

        There is one only in a process group of several ranks.
        """
        active_watch = world().watch
        assert active_watch is not None
        return active_watch

    def check(self, what: str, ranks: Ranks, *tensors: Tensor) -> int:
        state = world()
        state.check_reachable(ranks)
        return check_member(what, state.rank, ranks, *tensors)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        world().check_reachable(ranks)
        return False

    def bytes_by_messages(self) -> int:
        sockets = world().sockets
        return 0 if sockets is None else sockets.sent

    def record_hosts(self, ranks: Ranks, names: Sequence[Hashable], inside: Transport) -> None:
        """Record that ``ranks`` are on several hosts; ``names`` has the host of each rank.

        ``inside`` is a transport by which ranks of one host share memory. A subclass uses it; this
        class ignores the call and sends messages between all ranks.
        """

    def forget_hosts(self) -> None:
        """Drop what ``record_hosts`` stored; called when there is another default process group."""

    def agree_on_link(self, ranks: Ranks, host: str) -> None:
        """Agree on the cost of messages between all ranks of the world. A collective.

        It is called when they first communicate, if they share no memory. ``host`` is the name of
        this rank's host.
        """
        self._links[world()] = between.load_or_measure(self, ranks, host)

    def tune(self, ranks: Ranks, host: str) -> Table:
        """Measure the cost of messages between ``ranks``, and return it as a table. A collective.

        The table is stored on disk, and ``link`` returns its cost from now on. ``host`` is the name
        of this rank's host.
        """
        table = between.measure_and_save(self, ranks, host)
        self._links[world()] = table.link
        return table

    def link(self, kind: str) -> Link | None:
        """Return the cost of messages that ranks agreed on in ``agree_on_link``; None before that.

        All ranks call ``agree_on_link`` at the same step of the program, so at any step the result
        is the same on all of them.
        """
        return self._links.get(world()) if kind == "cpu" else None

    def abandon(self, why: str) -> bool:
        watch = world().watch
        if watch is not None:
            watch.give_up(why)
        return watch is not None

    # ---- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        if len(ranks) == 1 or x.numel() == 0 or _uses_nccl(x.device):
            return super().all_reduce(x, ranks, op)
        if _is_short(x):
            self.check("all_reduce", ranks, x)
            check_op(op, x.dtype)
            with describe_call("all_reduce", tuple(x.shape)):
                parts = short.exchange_short(f"all_reduce({op})", ranks, x.detach())
            return ordered_reduce([part.view_as(x) for part in parts], op)
        return self.all_reduce_async(x, ranks, op).wait()  # by messages, which leave x as it is

    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        name = f"all_reduce({op})"
        # Max and min of floats are combined by `ordered_reduce`, which propagates NaN.
        if _uses_nccl(x.device) and (op == "sum" or not x.dtype.is_floating_point):
            return self._nccl_all_reduce(name, x, ranks, op)
        x = x.contiguous()
        if self._takes_one_round(x.nbytes, len(ranks)):
            pieces = [x if rank == self.rank else torch.empty_like(x) for rank in ranks]
            transfer = self._start_all_gather(name, x, pieces, ranks)
            into = next(piece for piece in pieces if piece is not x)  # one of the first two pieces
            return PendingResult(transfer, lambda: ordered_reduce(pieces, op, into))
        fold = _TwoRoundAllReduce(self, name, x, ranks, op)
        previous_fold, self._last_two_round = self._last_two_round(), weakref.ref(fold)
        # Every rank that starts this all-reduce has started the last one, so waiting for its first
        # round cannot deadlock; its second round then travels while the program goes on.
        if previous_fold is not None:
            previous_fold.advance()
        return fold

    def _takes_one_round(self, nbytes: int, n: int) -> bool:
        """Return whether an all-reduce of ``nbytes`` between ``n`` ranks takes one round.

        In one round of messages each rank sends all of its tensor to all others.
        """
        return in_one_round(self.link("cpu"), nbytes, n)

    def _nccl_all_reduce(self, name: str, x: Tensor, ranks: Ranks, op: str) -> Handle:
        """Start NCCL's own all-reduce of ``x``; ``name`` is that of the call, for errors."""
        wire, op = _to_reducible(x.contiguous(), op)
        group = world().group(ranks)
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        options = dist.AllreduceOptions()
        options.reduceOp = ops[op]  # type: ignore[assignment]
        start = partial(group.allreduce, [wire], options)
        work = world().run_watched(name, x, ranks, start)
        return _NcclAllReduce(name, work, wire, x, ranks)

    # ---- gathers and all-to-alls ----------------------------------------------------------------

    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        out[ranks.index(self.rank)].copy_(x)
        self._start_all_gather("all_gather", x, out, ranks).wait()

    def _start_all_gather(
        self, name: str, x: Tensor, out: Sequence[Tensor], ranks: Ranks
    ) -> Waitable:
        """Start an all-gather of ``x`` that fills ``out``, except for this rank's own piece."""
        if not _uses_nccl(x.device):
            return messages.start_all_to_all(name, [x.contiguous()] * len(ranks), out, ranks)
        # If pieces differ in size, torch makes this a batch of NCCL broadcasts of the exact bytes.
        pieces = [as_bytes(out[k]) for k in _sorted_positions(ranks)]
        group = world().group(ranks)
        start = partial(group.allgather, [pieces], [as_bytes(x)])
        world().run_watched(name, x, ranks, lambda: start().wait())
        return CompletedHandle(x)

    def _all_to_all(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        position = ranks.index(self.rank)
        out[position].copy_(pieces[position])
        self._start_all_to_all("all_to_all", pieces, out, ranks).wait()

    def _start_all_to_all(
        self, name: str, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
    ) -> Waitable:
        """Start an all-to-all of ``pieces`` that fills ``out``, except this rank's own piece."""
        if not _uses_nccl(out[0].device):
            return messages.start_all_to_all(name, pieces, out, ranks)
        order = _sorted_positions(ranks)
        outgoing, incoming = ([as_bytes(part[k]) for k in order] for part in (pieces, out))
        group = world().group(ranks)
        start = partial(group.alltoall, incoming, outgoing)
        world().run_watched(name, pieces[0], ranks, lambda: start().wait())
        return CompletedHandle(pieces[0])

    def _start_reduce_scatter(
        self, parts: Sequence[Tensor], ranks: Ranks, op: str, at_once: bool
    ) -> Handle:
        """Start to combine all ranks' ``parts[k]`` by ``op`` on ``ranks[k]``: a reduce-scatter.

        ``wait()`` returns this rank's part. With ``at_once``, a subclass must start all messages in
        this call, so that ``wait()`` does not depend on what other ranks do after their own call.
        """
        position = ranks.index(self.rank)
        incoming = [
            x if k == position else torch.empty_like(parts[position]) for k, x in enumerate(parts)
        ]
        transfer = self._start_all_to_all("all_to_all", parts, incoming, ranks)
        return PendingResult(transfer, lambda: ordered_reduce(incoming, op))

    # ---- several at once ------------------------------------------------------------------------

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        world().check_reachable(ranks)
        return kind == "cpu"

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        if len(ranks) == 1 or _uses_nccl(xs[0].device):
            return super().all_gather_several(xs, dims, sizes, ranks, out)
        how = several.plan_packing(xs, dims, sizes, self.check("all_gather", ranks, *xs))
        with describe_call("all_gather_several", *how.agreed_layouts):
            return several.start_all_gather(
                self, [x.detach() for x in xs], dims, how, ranks, out
            ).wait()

    def start_all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if len(ranks) == 1 or _uses_nccl(xs[0].device):
            return super().start_all_gather_several(xs, dims, sizes, ranks)
        how = several.plan_packing(xs, dims, sizes, self.check("all_gather", ranks, *xs))
        with describe_call("start_all_gather_several", *how.agreed_layouts):
            return several.start_all_gather(self, [x.detach() for x in xs], dims, how, ranks)

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        if len(ranks) == 1 or _uses_nccl(xs[0].device):
            return super().reduce_scatter_several(xs, dims, sizes, ranks, op)
        self.check("reduce_scatter", ranks, *xs)
        inputs = [x.detach() for x in xs]
        how = several.plan_packing(xs, dims, sizes)
        with describe_call("reduce_scatter_several", op, *how.agreed_layouts):
            return several.start_reduce_scatter(
                self, inputs, dims, sizes, how, ranks, op=op, at_once=False
            ).wait()

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if len(ranks) == 1 or _uses_nccl(xs[0].device):
            return super().start_reduce_scatter_several(xs, dims, sizes, ranks)
        self.check("reduce_scatter", ranks, *xs)
        inputs = [x.detach() for x in xs]
        how = several.plan_packing(xs, dims, sizes)
        with describe_call("start_reduce_scatter_several", *how.agreed_layouts):
            return several.start_reduce_scatter(
                self, inputs, dims, sizes, how, ranks, op="sum", at_once=True
            )

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> PendingResult:
        position = self.check("all_to_all", ranks, *pieces)
        if len(ranks) == 1 or _uses_nccl(pieces[0].device):
            return super().start_all_to_all(pieces, shapes, ranks)
        inputs = [piece.detach() for piece in pieces]
        received = [inputs[position].new_empty(tuple(shape)) for shape in shapes]
        received[position].copy_(inputs[position])
        transfer = self._start_all_to_all("start_all_to_all", inputs, received, ranks)
        return PendingResult(transfer, lambda: received)

    # ---- notes ----------------------------------------------------------------------------------

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        self.check("gather_notes", ranks)
        if len(ranks) == 1:
            return [note]
        parts = short.exchange_short("gather_notes", ranks, has_note=bool(note))
        return self._gather_announced_notes(parts, note, ranks)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        if not _is_short(x) or len(told) == 1:
            return super().all_reduce_with_notes(x, ranks, told, op)
        self.check("all_reduce", ranks, x)
        check_op(op, x.dtype)
        call = messages.tag_of(f"all_reduce({op}) of {x.shape}", x, ranks)
        with hidden_from_modes():
            # A rank with a note calls `gather_notes`, so size and tag must be the same as there.
            parts = short.exchange_short("gather_notes", told, x.detach(), call=call)
            notes, parts_of_ranks = (
                self._gather_announced_notes(parts, b"", told),
                [parts[told.index(r)] for r in ranks],
            )
            if any(notes):
                return notes, None
            if all(part.call == call for part in parts_of_ranks):
                return notes, ordered_reduce([part.view_as(x) for part in parts_of_ranks], op)
        return notes, self.all_reduce(x, ranks, op)  # calls do not match: all ranks wait, and raise

    def _gather_announced_notes(
        self, parts: list[short.ShortMessage], note: bytes, ranks: Ranks
    ) -> list[bytes]:
        """Return the notes of all ranks, given their short messages ``parts``.

        These only say whether a rank has a note. If any has, the ranks gather the notes in a second
        round of messages, to which this rank contributes ``note``.
        """
        if not any(part.has_note for part in parts):
            return [b""] * len(ranks)
        with hidden_from_modes():
            return self.gather_objects(note, ranks)

    # ---- exchanges ------------------------------------------------------------------------------

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        if not _uses_nccl(device):
            first = next((x for _, x in (*sends, *out)), empty)
            messages.send_and_receive("exchange", first, sends, out, ranks)
            return
        outgoing = [torch.cat([empty, *(as_bytes(x) for to, x in sends if to == r)]) for r in ranks]
        places = [[as_bytes(x) for source, x in out if source == r] for r in ranks]
        incoming = [torch.cat([empty, *place]) for place in places]
        self._start_all_to_all("exchange", outgoing, incoming, ranks).wait()
        for place, piece in zip(places, incoming, strict=True):
            for x, part in zip(place, piece.split([x.numel() for x in place]), strict=True):
                x.copy_(part)

    def _send(self, x: Tensor, to: int, label: str) -> Handle:
        return messages.start_send(label, x, to)

    def _receive(self, out: Tensor, source: int, label: str) -> Handle:
        return messages.start_receive(label, out, source)

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        if not _uses_nccl(x.device):
            wire = x.cpu()
            messages.broadcast(wire, source, ranks)
            if wire is not x:
                x.copy_(wire)
            return
        options = dist.BroadcastOptions()
        options.rootRank = sorted(ranks).index(source)
        group = world().group(ranks)
        start = partial(group.broadcast, [as_bytes(x)], options)
        world().run_watched("broadcast", x, ranks, lambda: start().wait())

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        # Explicitly on the CPU, since the program may have set another default device.
        size = torch.tensor([payload.numel()], device="cpu")
        sizes = [size if rank == self.rank else torch.empty_like(size) for rank in ranks]
        self._start_all_gather("gather_objects", size, sizes, ranks).wait()
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu"}
        out = [payload if size is n else torch.empty(int(n), **kind) for n in sizes]
        self._start_all_gather("gather_objects", payload, out, ranks).wait()
        return [pickle.loads(piece.numpy().data) for piece in out]


class _TwoRoundAllReduce:
    """Started all-reduce in two rounds of messages: a reduce-scatter and an all-gather.

    Each rank combines one part of every rank's ``x``, and then the parts are gathered. This sends
    as many bytes as a ring, and sums in rank order.

    ```
    started     parts go to the ranks that combine them
    advance     the parts that came are combined, and the result goes to all ranks;
                called by wait, or when the next all-reduce is started
    wait        all results are there
    ```
    """

    def __init__(self, transport: TorchDist, name: str, x: Tensor, ranks: Ranks, op: str) -> None:
        self._transport, self._name, self._ranks, self._op = transport, name, ranks, op
        self._out, self._position = torch.empty_like(x), ranks.index(transport.rank)
        parts = x.view(-1).tensor_split(len(ranks))
        self._pieces = [
            part if k == self._position else torch.empty_like(parts[self._position])
            for k, part in enumerate(parts)
        ]
        self._transfer: Waitable = transport._start_all_to_all(name, parts, self._pieces, ranks)
        self._is_combined, self._call = False, current_call()

    def advance(self) -> None:
        """Wait for the first round, combine this rank's part, and start to gather all parts."""
        if self._is_combined:
            return
        self._transfer.wait()
        places = self._out.view(-1).tensor_split(len(self._ranks))
        places[self._position].copy_(ordered_reduce(self._pieces, self._op))
        self._is_combined, self._pieces = True, []
        with resume_call(self._call):
            self._transfer = self._transport._start_all_gather(
                self._name, places[self._position], places, self._ranks
            )

    def wait(self) -> Tensor:
        self.advance()
        self._transfer.wait()
        return self._out


class _NcclAllReduce:
    """Handle of an all-reduce that NCCL carries out in place in ``wire``.

    ``wait()`` returns the result with the device and dtype of ``x``, since ``wire`` may have a
    dtype that NCCL can reduce in its place.
    """

    def __init__(self, name: str, work: Any, wire: Tensor, x: Tensor, ranks: Ranks) -> None:
        self.name, self.work, self.wire, self.like, self.ranks = name, work, wire, x, ranks

    def wait(self) -> Tensor:
        x, wire = self.like, self.wire
        world().check_reachable(self.ranks)
        # Without the wait `wire` would be read while the reduction still writes it.
        world().run_watched(self.name, x, self.ranks, self.work.wait)
        if x.dtype.is_complex:
            wire = torch.view_as_complex(wire)
        elif x.dtype == torch.bool:
            wire = wire.view(torch.bool)
        return wire.to(device=x.device, dtype=x.dtype)


def in_one_round(link: Link | None, nbytes: int, n: int) -> bool:
    """Return whether an all-reduce of ``nbytes`` between ``n`` ranks takes one round of messages.

    In one round each rank sends all of its tensor to all others. That sends more bytes than two
    rounds, and saves the latency of one; ``link`` is the cost of both, or None if unknown.
    """
    link = link or _DEFAULT_LINK
    extra_bytes = nbytes * (n - 1) * (n - 2) / n  # none between two
    return extra_bytes <= link.latency_s * link.bytes_per_s


def _to_reducible(x: Tensor, op: str) -> tuple[Tensor, str]:
    """Return (``x``, ``op``) converted to a dtype and an op that NCCL can reduce.

    For example a bool tensor and "sum" become its uint8 view and "max".
    """
    if x.dtype == torch.bool:
        return x.view(torch.uint8), "min" if op == "min" else "max"
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj()), op
    return x.to(WIDER_DTYPES.get(x.dtype, x.dtype)), op


def _is_short(x: Tensor) -> bool:
    """Return whether ``x`` fits in a short message: a CPU tensor of 1 to 64 bytes."""
    return x.is_cpu and 0 < x.nbytes <= short.CARRIED_BYTES


def _uses_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and world().uses_nccl


def _sorted_positions(ranks: Ranks) -> list[int]:
    # The members of an NCCL group are sorted by rank.
    return sorted(range(len(ranks)), key=ranks.__getitem__)
