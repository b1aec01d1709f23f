"""Transport for ranks of one host, which move CPU tensors through shared memory.

"The transport below" is the one that ``SharedMemory`` wraps, which sends messages; everything else
goes to it. A group of ranks shares one segment of memory, which is made in its first call. All
members must be processes of one user on one host (``host_identity``), and all must have mapped the
segment. If one could not, there is one warning, and the calls go to the transport below. The name
of the segment is unlinked once all have mapped it, so nothing is left behind when a process is
killed. A segment whose creator died before that is unlinked by the next start.

Every call begins with a header that describes the rank's call. A mismatch raises RuntimeError on
every rank before anything is moved. If a rank ends, or does not come within the timeout of the
process group, the others raise. Reductions add in the order of the ranks, floats of two bytes in
float32: they give the bits of ``ordered_reduce``, on every rank and in every run.

A collective that the transport below does faster goes there, after the headers were found to match.
CONSISTENT_SHARED_MEMORY=0 in the environment of one member switches shared memory off for the
group. If a group is on several hosts, the transport below is notified: the members on one host then
form a group that shares memory.
"""

from __future__ import annotations

import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ...comm import (
    CompletedHandle,
    Handle,
    Link,
    PendingResult,
    Ranks,
    Shape,
    check_member,
    check_op,
)
from ..base.unseen import hidden_from_modes
from ..base.wrapper import Wrapper
from ..failures import counts_out_of_memory, is_out_of_memory
from ..faults.turns import check
from ..faults.watch import Wait
from ..torch_dist import TorchDist, children, groups
from ..torch_dist.messages import as_bytes
from ..tuning.link import agreed_link, stored_link
from ..tuning.measure import TwoWays, load_or_measure, measure_and_save
from ..tuning.table import Table, cpu_device_name
from . import segments
from .pieces import concat_bytes, nbytes_with_sizes, output_tensors

T = TypeVar("T")

SLOT_BYTES = 512 * 1024  # bytes that a rank writes at once; its two slots both fit in a cache

REDUCIBLE_DTYPES = frozenset(
    (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)
)
SUMMABLE_DTYPES = REDUCIBLE_DTYPES | {
    torch.complex64,
    torch.complex128,
}  # complex numbers have no order


class SharedMemory(Wrapper):
    """Wrapper that moves CPU tensors between ranks of one host through shared memory.

    Everything else goes to ``inner``. A rank writes at most ``slot_bytes`` at once.
    """

    inner: TorchDist

    def __init__(self, inner: TorchDist, slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__(inner)
        self.slot_bytes = slot_bytes
        self._groups: dict[Ranks, Any] = {}
        self._hosts: dict[int, str] = {}  # host by rank, of the ranks that this one has met
        self._tables: dict[Ranks, Table] = {}  # groups for which messages are sometimes faster
        self._world_ref: Any = lambda: None  # weak reference to the process group of these fields
        self._making_lock = threading.RLock()

    def rank_in(self, placement: Any) -> int:
        return groups.world().rank  # as `inner` would, but faster: every boxing calls this

    def group(self, ranks: Ranks) -> Any:
        """Return the shared segment of ``ranks`` (``_C.Group``); None if they share no memory.

        The first call for ``ranks`` makes it, and is a collective.
        """
        world = c10d.GroupMember.WORLD
        # The fast path compares torch's group only; `inner.world()` is for a new or a child's
        # group.
        if world is None or world is not self._world_ref() or world is children.inherited:
            world = self.inner.world()
            if world is None:
                self.inner.shares(ranks, "cpu")  # raises in a child of a rank
                return None
            if world is not self._world_ref():
                self._groups, self._tables, self._world_ref = {}, {}, weakref.ref(world)
                self._hosts = {}
                self.inner.forget_hosts()
        try:
            return self._groups[ranks]
        except KeyError:
            pass
        if len(ranks) < 2 or self.inner.rank not in ranks:
            return None
        # Two threads may get here at once: only one may run the collective that makes the group.
        with self._making_lock, hidden_from_modes():
            if ranks not in self._groups:
                segment = segments.make_segment(
                    self.inner, ranks, self.slot_bytes, self.inner.timeout_s()
                )
                self._hosts.update(zip(ranks, segment.hosts, strict=True))
                if segment.are_on_several_hosts:
                    self.inner.record_hosts(ranks, segment.hosts, self)
                self._groups[ranks] = segment.group
                if segment.group is None and ranks == tuple(range(self.size)):
                    self.inner.agree_on_link(ranks, segments.host())
                if segment.group is not None:
                    self.inner.watch.waiters.add(self)
                    self._use_table(load_or_measure(self._two_ways(ranks), self.may_measure), ranks)
        return self._groups[ranks]

    @property
    def may_measure(self) -> bool:
        """True if ranks may measure whether shared memory or messages are faster.

        Otherwise they use a stored or the built-in table.
        """
        return self.inner.may_measure

    def _checked_group(self, ranks: Ranks) -> Any:
        """Return ``group(ranks)``, after a check that this thread may communicate.

        Each collective begins with this. Raises RuntimeError if the thread may not communicate. The
        result is None, and nothing is checked, if ``ranks`` share no memory.
        """
        group = self.group(ranks)
        if group is not None:
            check()
        return group

    def waits(self) -> list[Wait]:
        """Return (seconds so far, thread's ident, call) for each wait for ranks in shared memory.

        Ranks that wait in vain for this one report it in their error.
        """
        waits_by_group = [
            (ranks, group.waiting()) for ranks, group in list(self._groups.items()) if group
        ]
        return [
            (seconds, thread, f"{call} over ranks {ranks}, which are at steps {steps}")
            for ranks, wait in waits_by_group
            if wait
            for seconds, thread, call, steps in [wait]
        ]

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        return kind == "cpu" and self.group(ranks) is not None

    def overlaps(self, ranks: Ranks, kind: str) -> bool:
        return not self.shares(ranks, kind) and self.inner.overlaps(ranks, kind)

    def hosts_of(self, ranks: Ranks) -> tuple[int, ...] | None:
        if c10d.GroupMember.WORLD is not self._world_ref() or not self._hosts.keys() >= set(ranks):
            return None
        names = [self._hosts[rank] for rank in ranks]
        numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    def link(self, kind: str) -> Link | None:
        """Return the measured cost of messages of ``inner``, or if unknown that of shared memory.

        The cost of shared memory is from the stored table for the whole world, if all of its ranks
        share memory.
        """
        measured_link = self.inner.link(kind)
        return measured_link or (
            agreed_link(self.inner, kind, self._own_link) if kind == "cpu" else None
        )

    def _own_link(self) -> Link | None:
        return stored_link(
            self.size, cpu_device_name(), segments.should_share_memory(range(self.size))
        )

    def _two_ways(self, ranks: Ranks) -> TwoWays:
        one_shot = self._groups[ranks].set_one_shot
        return TwoWays(self, self.inner, ranks, torch.device("cpu"), cpu_device_name(), one_shot)

    def tune(self, ranks: Ranks) -> Table:
        """Measure which sizes ``ranks`` should send by shared memory and which by messages.

        The resulting table is stored on disk, returned, and used by this object from now on. If the
        ranks share no memory, only the cost of messages is measured. A collective over ``ranks``.
        """
        if self.group(ranks) is None:
            return self.inner.tune(ranks, segments.host())
        # So that `self` uses shared memory for every size while it is measured.
        self._tables.pop(ranks, None)
        table = measure_and_save(self._two_ways(ranks))
        self._use_table(table, ranks)
        return table

    def _use_table(self, table: Table, ranks: Ranks) -> None:
        """Apply the limits in ``table`` to the collectives of ``ranks`` from now on."""
        self._groups[ranks].set_one_shot(table.one_shot, table.one_shot_narrow)
        if table.messages_above:
            self._tables[ranks] = table

    def _are_messages_faster(
        self, move: str, dtype: torch.dtype, nbytes: int, ranks: Ranks
    ) -> bool:
        """Return whether messages of ``inner`` are faster than shared memory, by the table.

        ``move`` is the name of the collective, for a logical tensor of ``nbytes``.
        """
        table = self._tables.get(ranks)
        return table is not None and table.by_messages(move, dtype, nbytes)

    # ---- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None or x.dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES):
            return self.inner.all_reduce(x, ranks, op)
        check_op(op, x.dtype)
        if self._tables and self._are_messages_faster("all_reduce", x.dtype, x.nbytes, ranks):
            # Headers are compared all the same, so that a mismatch raises on every rank.
            group.meet_all_reduce(x, op)
            return self.inner.all_reduce(x, ranks, op)
        return group.all_reduce(x, op, False)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None or x.dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES):
            return self.inner.all_reduce_async(x, ranks, op)
        check_op(op, x.dtype)
        if self._tables and self._are_messages_faster("all_reduce", x.dtype, x.nbytes, ranks):
            group.meet_all_reduce(x, op)
            return self.inner.all_reduce_async(x, ranks, op)
        return CompletedHandle(group.all_reduce(x.detach(), op, True))

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None:
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        if x.dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES):
            # Past `Wrapper`, to the default in `Transport`, which is built on the `all_to_all` of
            # this class.
            return super(Wrapper, self).reduce_scatter(x, dim, sizes, ranks, op)
        check_op(op, x.dtype)
        if self._tables and self._are_messages_faster("reduce_scatter", x.dtype, x.nbytes, ranks):
            group.meet_reduce_scatter(x, dim, sizes, op)
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        return group.reduce_scatter(x, dim, sizes, op)

    # ---- gathers and exchanges ------------------------------------------------------------------

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None:
            return self.inner.all_gather_into_tensor(x, dim, sizes, ranks)
        if self._tables:
            nbytes = nbytes_with_sizes(x, {dim: sum(sizes)})
            if self._are_messages_faster("all_gather_into_tensor", x.dtype, nbytes, ranks):
                group.meet_all_gather(x, dim, sizes)
                return self.inner.all_gather_into_tensor(x, dim, sizes, ranks)
        return group.all_gather(x, dim, sizes)

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        group = self._checked_group(ranks) if all(x.is_cpu for x in xs) else None
        if group is None:
            return self.inner.all_gather_several(xs, dims, sizes, ranks, out)
        if self._tables:
            whole = [
                nbytes_with_sizes(x, {d: sum(s)}) for x, d, s in zip(xs, dims, sizes, strict=True)
            ]
            if any(
                self._are_messages_faster("all_gather_into_tensor", xs[0].dtype, nbytes, ranks)
                for nbytes in whole
            ):
                return super(Wrapper, self).all_gather_several(xs, dims, sizes, ranks, out)
        places = None if out is None else list(out)
        return group.all_gather_several(list(xs), list(dims), list(sizes), places)

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        group = self._checked_group(ranks) if all(x.is_cpu for x in xs) else None
        if group is None:
            return self.inner.reduce_scatter_several(xs, dims, sizes, ranks, op)
        dtype = xs[0].dtype
        check_op(op, dtype)
        is_separate = dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES) or any(
            self._are_messages_faster("reduce_scatter", dtype, x.nbytes, ranks) for x in xs
        )
        if is_separate:
            return super(Wrapper, self).reduce_scatter_several(xs, dims, sizes, ranks, op)
        return group.reduce_scatter_several(list(xs), list(dims), list(sizes), op)

    def start_all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if all(x.is_cpu for x in xs) and self.group(ranks) is not None:
            return super(Wrapper, self).start_all_gather_several(xs, dims, sizes, ranks)
        return self.inner.start_all_gather_several(xs, dims, sizes, ranks)

    def start_reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
    ) -> PendingResult:
        if all(x.is_cpu for x in xs) and self.group(ranks) is not None:
            return super(Wrapper, self).start_reduce_scatter_several(xs, dims, sizes, ranks)
        return self.inner.start_reduce_scatter_several(xs, dims, sizes, ranks)

    def start_all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], ranks: Ranks
    ) -> PendingResult:
        if pieces[0].is_cpu and self.group(ranks) is not None:
            return super(Wrapper, self).start_all_to_all(pieces, shapes, ranks)
        return self.inner.start_all_to_all(pieces, shapes, ranks)

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None:
            return self.inner.all_to_all_single(
                x, split_dim, split_sizes, concat_dim, concat_sizes, ranks
            )
        if self._tables:
            nbytes = nbytes_with_sizes(x, {concat_dim: sum(concat_sizes)})
            if self._are_messages_faster("all_to_all_single", x.dtype, nbytes, ranks):
                group.meet_all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes)
                return self.inner.all_to_all_single(
                    x, split_dim, split_sizes, concat_dim, concat_sizes, ranks
                )
        return group.all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None:
            return self.inner.all_gather(x, shapes, ranks, out)
        pieces = _allocate_or_refuse(group, lambda: output_tensors(x, shapes, out))
        group.gather_into(x, pieces)
        return pieces

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        group = self._checked_group(ranks) if pieces[0].is_cpu else None
        if group is None:
            return self.inner.all_to_all(pieces, shapes, ranks, out)
        received = _allocate_or_refuse(group, lambda: output_tensors(pieces[0], shapes, out))
        group.all_to_all_into(list(pieces), received, False)
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
        group = self._checked_group(ranks) if torch.device(device).type == "cpu" else None
        if group is None:
            return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        source_position = check_member("broadcast from source", source, ranks)
        if self._tables:
            nbytes = math.prod(shape) * dtype.itemsize
            if self._are_messages_faster("broadcast", dtype, nbytes, ranks):
                group.meet_broadcast(x, shape, dtype, source_position)
                return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        return group.broadcast(x, shape, dtype, source_position)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        group = self._checked_group(ranks) if torch.device(device).type == "cpu" else None
        if group is None:
            return self.inner.exchange(sends, receives, ranks, device)
        sources = [source for source, _, _ in receives]

        def allocate() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]]:
            out = [torch.empty(tuple(shape), dtype=dtype) for _, shape, dtype in receives]
            pieces = [concat_bytes([x for to, x in sends if to == rank]) for rank in ranks]
            places = [[x for source, x in zip(sources, out) if source == rank] for rank in ranks]
            # A single message is received in its place; several arrive as one and are cut.
            return out, pieces, places, [p[0] if len(p) == 1 else concat_bytes(p) for p in places]

        out, pieces, places, received = _allocate_or_refuse(group, allocate)
        group.all_to_all_into(pieces, received, True)
        for place, message in zip(places, received):
            if len(place) > 1:
                for x, part in zip(place, message.split([x.nbytes for x in place])):
                    as_bytes(x).copy_(part)
        return out

    @counts_out_of_memory
    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        group = self._checked_group(ranks)
        if group is None:
            return self.inner.gather_objects(obj, ranks)
        note = _allocate_or_refuse(group, lambda: pickle.dumps(obj))
        return [pickle.loads(text) for text in group.gather_objects(note)]

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        group = self.group(ranks)
        return self.inner.gather_notes(note, ranks) if group is None else group.gather_objects(note)

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        if self.group(told) is None:
            return self.inner.all_reduce_with_notes(x, ranks, told, op)
        return super(Wrapper, self).all_reduce_with_notes(x, ranks, told, op)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        group = self._checked_group(ranks) if x.is_cpu else None
        if group is None:
            return self.inner.peers(x, ranks)
        if x.nbytes > group.room() and not segments.grow_segment(group, x.nbytes, ranks, self):
            return super(Wrapper, self).peers(x, ranks)
        return _shared_views(group, x)

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        # Summing while the data is in the cache is faster than reading every rank's x again later.
        return super(Wrapper, self).addends(x, dim, sizes, ranks)


def _allocate_or_refuse(group: Any, make: Callable[[], T]) -> T:
    """Return ``make()``, which allocates what a collective call of ``group`` needs.

    If it runs out of memory, the other members of the group are notified, so that they raise in
    that call instead of waiting for this rank.
    """
    try:
        return make()
    except Exception as error:
        if is_out_of_memory(error):
            group.refuse()
        raise


@contextmanager
def _shared_views(group: Any, x: Tensor) -> Iterator[list[Tensor]]:
    """Copy ``x`` into the shared segment, and yield views of every rank's ``x`` there."""
    views = group.stage(x)
    try:
        yield views
    finally:
        group.unstage()
