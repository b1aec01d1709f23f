"""Transport between ranks of one host whose GPUs read each other's memory.

Everything else goes to the transport below, the one that ``SymmetricMemory`` wraps.

```
each rank   tensor -> own slot        barrier of the GPUs       all slots -> result
            one copy                                            one kernel (csrc/peer/device_moves)
```

A rank has two slots, used in turn, as in the segment that ranks share on the CPU, so one barrier in
each step is enough. The kernel handles the dims that are cut or joined. Before anything is launched
on a GPU, the ranks meet in the segment that their processes share (``SharedMemory.group``). There
they compare their calls, and if a rank has died or does not come all raise, so that no GPU waits
for it. Sums add in the order of the ranks, floats of two bytes in float32, with the bits of
``ordered_reduce``.

Tensors longer than a slot, and collectives that messages do faster by the table of timings
(``tuning/table.py``), go to the transport below. So does everything if GPUs cannot reach each other
or a first trial of the collectives fails (one warning), if processes share no segment, and with
CONSISTENT_SHARED_MEMORY=0.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...comm import CompletedHandle, Handle, Link, Ranks, Shape, check_member, check_op
from ..base.unseen import hidden_from_modes
from ..base.wrapper import Wrapper
from ..faults.turns import check
from ..shared_memory import (
    REDUCIBLE_DTYPES,
    SUMMABLE_DTYPES,
    SharedMemory,
    nbytes_with_sizes,
    should_share_memory,
    warn,
)
from ..tuning.link import agreed_link, stored_link
from ..tuning.measure import TwoWays, load_or_measure, measure_and_save
from ..tuning.table import Table
from .device_moves import DeviceMemory, DeviceMoves
from .gpu_memory import GpuMemory

SLOT_BYTES = 16 * 1024 * 1024  # bytes that a rank writes at once; it has two slots
MAX_RANKS = 32  # kMostPeers of csrc/peer/device_moves.h

T = TypeVar("T")
MakeMemory = Callable[[int, torch.device, Ranks, int, str], DeviceMemory]


class SymmetricMemory(Wrapper):
    """Wrapper that moves tensors between ranks of one host whose devices read each other's memory.

    Args:
        inner: the transport for everything else.
        kind: the type of the devices that are served.
        slot_bytes: how many bytes a rank can write at once; larger tensors go to ``inner``.
        make: makes the memory that the devices share; called with the arguments of ``GpuMemory``.
    """

    inner: SharedMemory

    def __init__(
        self,
        inner: SharedMemory,
        kind: str = "cuda",
        slot_bytes: int = SLOT_BYTES,
        make: MakeMemory = GpuMemory,
    ) -> None:
        super().__init__(inner)
        self.kind, self.slot_bytes, self._make_memory = kind, slot_bytes, make
        self._groups: dict[tuple[Ranks, torch.device], tuple[Any, DeviceMoves | None]] = {}
        self._making_lock = threading.RLock()
        self.why_not: dict[Ranks, str] = {}  # the error for ranks that failed to share memory

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        if x.device.type != self.kind:
            return self.inner.all_reduce_with_notes(x, ranks, told, op)
        return super(Wrapper, self).all_reduce_with_notes(x, ranks, told, op)

    def shares(self, ranks: Ranks, kind: str, nbytes: int = 0) -> bool:
        if kind != self.kind:
            return self.inner.shares(ranks, kind, nbytes)
        return self._group(_indexed_device(kind), ranks) is not None and nbytes <= self.slot_bytes

    def link(self, kind: str) -> Link | None:
        """Return the measured cost of messages between devices of type ``kind``; None if unknown.

        For devices that this transport serves it is from the stored table for the whole world.
        """
        if kind != self.kind:
            return self.inner.link(kind)
        return agreed_link(self.inner.inner, kind, self._own_link)

    def _own_link(self) -> Link | None:
        shared = should_share_memory(range(self.size)) and self.size <= MAX_RANKS
        return stored_link(self.size, _device_model(_indexed_device(self.kind)), shared)

    def tune(self, ranks: Ranks) -> Table | None:
        """Measure which sizes ``ranks`` should move through device memory and which by messages.

        The resulting table is stored on disk, returned, and used by this object from now on. The
        result is None if the devices share no memory. A collective over ``ranks``.
        """
        group = self._group(_indexed_device(self.kind), ranks)
        if group is None:
            return None
        group.table = Table()
        self._apply_table(
            group, measure_and_save(self._two_ways(group, _indexed_device(self.kind), ranks))
        )
        return group.table

    def _group(self, device: torch.device, ranks: Ranks) -> DeviceMoves | None:
        """Return the object that runs the collectives of ``ranks``; None if they share no memory.

        The first call for ``ranks`` makes it, and is a collective.
        """
        if device.type != self.kind:
            return None
        meeting = self.inner.group(ranks)
        if meeting is None:
            return None
        entry = self._groups.get((ranks, device))
        if entry is None or entry[0] is not meeting:  # not made yet, or for an earlier world
            with self._making_lock, hidden_from_modes():
                # Looked up again: another thread may have made it while this one waited.
                entry = self._groups.get((ranks, device))
                if entry is None or entry[0] is not meeting:
                    entry = meeting, self._make_moves(meeting, device, ranks)
                    self._groups[ranks, device] = entry
                    if entry[1] is not None:
                        ways = self._two_ways(entry[1], device, ranks)
                        self._apply_table(entry[1], load_or_measure(ways, self.inner.may_measure))
        return entry[1]

    def _checked_group(self, device: torch.device, ranks: Ranks) -> DeviceMoves | None:
        """Return ``_group(device, ranks)``, after a check that this thread may communicate.

        Each collective begins with this. Raises RuntimeError if the thread may not communicate. The
        result is None, and nothing is checked, if ``ranks`` share no memory.
        """
        group = self._group(device, ranks)
        if group is not None:
            check()
        return group

    def _make_moves(self, meeting: Any, device: torch.device, ranks: Ranks) -> DeviceMoves | None:
        """Make the memory that the devices of ``ranks`` share, and test it; None if it fails.

        ``meeting`` is the shared segment of the ranks' processes. A collective over ``ranks``.
        """
        if len(ranks) > MAX_RANKS:
            return None
        if self.inner.inner.gpus_may_lose_ranks:
            self.why_not[ranks] = "the job goes on without ranks that are lost"
            return None
        position, timeout_s = ranks.index(self.rank), self.inner.inner.timeout_s()
        # A name that is used nowhere else, and the same on all ranks: the first one's.
        name = self.gather_objects(f"mirrored/{uuid.uuid4()}", ranks)[0]
        make = partial(self._make_memory, 2 * self.slot_bytes, device, ranks, position, name)
        memory = self._make_on_all_ranks(make, ranks)
        if memory is None:
            return None
        moves = DeviceMoves(memory, meeting, position, self.slot_bytes, timeout_s)
        return self._make_on_all_ranks(partial(moves.self_tested, device), ranks)

    def _make_on_all_ranks(self, make: Callable[[], T], ranks: Ranks) -> T | None:
        """Return ``make()``; None, with a warning, if it raises on any of ``ranks``.

        So either all ranks share memory or none does. A collective over ``ranks``.
        """
        result, fault = None, ""
        try:
            # Not in inference mode: its tensors could not be used in other modes later.
            with torch.inference_mode(False), torch.no_grad():
                result = make()
        except Exception as error:  # such as AttributeError, from torch's private names
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
        faults = [each for each in self.gather_objects(fault, ranks) if each]
        if faults:
            self.why_not[ranks] = faults[0]
            warn(ranks, "the memory of their devices", faults[0], "Give them peer access")
        return None if faults else result

    def _two_ways(self, group: DeviceMoves, device: torch.device, ranks: Ranks) -> TwoWays:
        return TwoWays(self, self.inner, ranks, device, _device_model(device), group.set_one_shot)

    def _apply_table(self, group: DeviceMoves, table: Table) -> None:
        """Apply the limits in ``table`` to the collectives of ``group`` from now on."""
        group.set_one_shot(table.one_shot, table.one_shot_narrow)
        group.table = table

    # ---- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        out = self._all_reduce(x, ranks, op)
        return self.inner.all_reduce(x, ranks, op) if out is None else out

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        out = self._all_reduce(x, ranks, op)
        return self.inner.all_reduce_async(x, ranks, op) if out is None else CompletedHandle(out)

    def _all_reduce(self, x: Tensor, ranks: Ranks, op: str) -> Tensor | None:
        """Return ``x`` reduced by ``op``; None if ``inner`` should reduce it.

        It should if the ranks share no memory, for dtypes that the kernel does not reduce, and for
        sizes that do not fit or that messages reduce faster.
        """
        group = self._checked_group(x.device, ranks)
        if group is None or x.dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES):
            return None
        check_op(op, x.dtype)
        # Compare headers before `serves`: a rank with another call would decide otherwise.
        group.meeting.meet_all_reduce(x, op)
        if not group.serves("all_reduce", x.dtype, x.nbytes, x.nbytes):
            return None
        return group.all_reduce(x, op)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        group = self._checked_group(x.device, ranks)
        if group is None or x.dtype not in (SUMMABLE_DTYPES if op == "sum" else REDUCIBLE_DTYPES):
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        check_op(op, x.dtype)
        group.meeting.meet_reduce_scatter(x, dim, sizes, op)
        if not group.serves("reduce_scatter", x.dtype, x.nbytes, x.nbytes):
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        return group.reduce_scatter(x, dim, sizes, op)

    # ---- gathers and exchanges ------------------------------------------------------------------

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        group = self._checked_group(x.device, ranks)
        if group is None:
            return self.inner.all_gather_into_tensor(x, dim, sizes, ranks)
        group.meeting.meet_all_gather(x, dim, sizes)
        written_bytes, nbytes = (nbytes_with_sizes(x, {dim: n}) for n in (max(sizes), sum(sizes)))
        if not group.serves("all_gather_into_tensor", x.dtype, written_bytes, nbytes):
            return self.inner.all_gather_into_tensor(x, dim, sizes, ranks)
        return group.all_gather_into_tensor(x, dim, sizes)

    def all_gather_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        if self._checked_group(xs[0].device, ranks) is None:
            return self.inner.all_gather_several(xs, dims, sizes, ranks, out)
        return super(Wrapper, self).all_gather_several(xs, dims, sizes, ranks, out)

    def reduce_scatter_several(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ranks: Ranks,
        op: str = "sum",
    ) -> list[Tensor]:
        if self._checked_group(xs[0].device, ranks) is None:
            return self.inner.reduce_scatter_several(xs, dims, sizes, ranks, op)
        return super(Wrapper, self).reduce_scatter_several(xs, dims, sizes, ranks, op)

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        group = self._checked_group(x.device, ranks)
        if group is None:
            return self.inner.all_to_all_single(
                x, split_dim, split_sizes, concat_dim, concat_sizes, ranks
            )
        split_args = split_dim, split_sizes, concat_dim, concat_sizes
        group.meeting.meet_all_to_all(x, *split_args)
        sizes = max(concat_sizes), sum(concat_sizes)
        written_bytes, nbytes = (nbytes_with_sizes(x, {concat_dim: n}) for n in sizes)
        if not group.serves("all_to_all_single", x.dtype, written_bytes, nbytes):
            return self.inner.all_to_all_single(x, *split_args, ranks)
        return group.all_to_all_single(x, *split_args)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        own_device = _indexed_device(device)
        group = self._checked_group(own_device, ranks)
        if group is None:
            return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        source_position = check_member("broadcast from source", source, ranks)
        group.meeting.meet_broadcast(x, shape, dtype, source_position)
        out = torch.empty(tuple(shape), dtype=dtype, device=own_device)
        if not group.serves("broadcast", out.dtype, out.nbytes, out.nbytes):
            return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        return group.broadcast(x if source == self.rank else None, out, source_position)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        group = self._checked_group(x.device, ranks)
        if group is None:
            return self.inner.peers(x, ranks)
        group.meeting.meet_peers(x)
        if x.nbytes > group.slot_bytes:
            return self.inner.peers(x, ranks)
        return group.peers(x)

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        # A kernel that reads every rank's x directly saves writing the sum and reading it back.
        group = self._checked_group(x.device, ranks)
        if group is None or x.nbytes > group.slot_bytes:
            return super(Wrapper, self).addends(x, dim, sizes, ranks)
        group.meeting.meet_peers(x)
        return _peers_with_start(group, x, sum(sizes[: ranks.index(self.rank)]))


@contextmanager
def _peers_with_start(
    group: DeviceMoves, x: Tensor, start: int
) -> Iterator[tuple[list[Tensor], int]]:
    with group.peers(x) as peers:
        yield peers, start


def _device_model(device: torch.device) -> str:
    """Return the device's model, under which tables of timings for such devices are stored."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _indexed_device(device_or_name: torch.device | str) -> torch.device:
    """Return the device with an index: that of the current GPU if it has none."""
    device = torch.device(device_or_name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
