"""Ranks of one host whose GPUs read each other's memory; all else goes to the transport below.

```
each rank   tensor -> own place       barrier of the GPUs       all places -> result
            one copy                                            one kernel (csrc/peer/device_moves)
```

A rank has two places, used in turn, as ranks have slots of a segment on the CPU: a barrier each
step, and no other. The dims that are cut or joined are dealt with in the kernel. Before a GPU is
given anything the ranks meet in the segment that their processes share (`SharedMemory.group`). They
compare there what they call, and one that died or does not come makes all raise, so that no GPU
waits for it. Sums add in the order of the ranks, short floats in float32: `ordered_reduce`'s bits.

Tensors longer than a place, and moves that the table says messages do faster, go below. So does all
where GPUs don't reach each other or a first trial of the moves goes wrong (one warning), where
processes share no segment, and with CONSISTENT_SHARED_MEMORY=0.
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

from ..comm import Done, Handle, Ranks, Shape, check_member, check_op
from ..symmetric import Peers
from . import segments, tune
from .layer import Layer
from .places import DeviceMemory, Places
from .shared_memory import REDUCED, SUMMED, SharedMemory, bytes_with
from .table import Table

PLACE = 16 * 1024 * 1024  # bytes a rank gives at once, twice
MOST_RANKS = 32  # csrc/peer/device_moves.h

T = TypeVar("T")
Make = Callable[[int, torch.device, Ranks, int, str], DeviceMemory]


class SymmetricMemory(Layer):
    """Moves tensors of `kind` devices between ranks of one host; asks `inner` for all else.

    `make` gives the memory that the devices share, `place` is the number of bytes that a rank gives
    at once.
    """

    inner: SharedMemory

    def __init__(
        self,
        inner: SharedMemory,
        kind: str = "cuda",
        place: int = PLACE,
        make: Make = Peers,
    ) -> None:
        super().__init__(inner)
        self.kind, self.place, self._make_peers = kind, place, make
        self._groups: dict[tuple[Ranks, torch.device], tuple[Any, Places | None]] = {}
        self._making = threading.RLock()

    def shares(self, ranks: Ranks, kind: str) -> bool:
        if kind != self.kind:
            return self.inner.shares(ranks, kind)
        return self._group(_device(kind), ranks) is not None

    def tune(self, ranks: Ranks) -> Table | None:
        """Measure the table for so many ranks anew, keep it and use it. A collective."""
        group = self._group(_device(self.kind), ranks)
        if group is None:
            return None
        group.table = Table()
        self._use(group, tune.measured(self._tried(group, _device(self.kind), ranks)))
        return group.table

    def _group(self, device: torch.device, ranks: Ranks) -> Places | None:
        """The ranks' places; None where there are none. Made in the first call."""
        if device.type != self.kind:
            return None
        meeting = self.inner.group(ranks)
        if meeting is None:
            return None
        known = self._groups.get((ranks, device))
        if known is None or known[0] is not meeting:  # none yet, or of a world that was left
            with self._making:
                known = self._groups.get((ranks, device))
                if known is None or known[0] is not meeting:
                    known = meeting, self._make(meeting, device, ranks)
                    self._groups[ranks, device] = known
                    if known[1] is not None:
                        self._use(known[1], tune.agreed(self._tried(known[1], device, ranks)))
        return known[1]

    def _make(self, meeting: Any, device: torch.device, ranks: Ranks) -> Places | None:
        if len(ranks) > MOST_RANKS:
            return None
        at, timeout_s = ranks.index(self.rank), self.inner.inner.timeout_s()
        name = self.gather_objects(f"mirrored/{uuid.uuid4()}", ranks)[0]
        make = partial(self._make_peers, 2 * self.place, device, ranks, at, name)
        peers = self._unless_faulty(make, ranks)
        if peers is None:
            return None
        places = Places(peers, meeting, at, self.place, timeout_s)
        return self._unless_faulty(partial(places.tried, device), ranks)

    def _unless_faulty(self, make: Callable[[], T], ranks: Ranks) -> T | None:
        """What `make` gives; None, with a warning, where it raises on any rank."""
        made, fault = None, ""
        try:
            with torch.inference_mode(False), torch.no_grad():  # it serves in every mode
                made = make()
        except RuntimeError as error:
            fault = str(error).partition("\n")[0]
        faults = [each for each in self.gather_objects(fault, ranks) if each]
        if faults:
            segments.warn(ranks, "the memory of their devices", faults[0], "Give them peer access")
        return None if faults else made

    def _tried(self, group: Places, device: torch.device, ranks: Ranks) -> tune.Tried:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return tune.Tried(self, self.inner, ranks, device, name, group.set_one_shot)

    def _use(self, group: Places, found: Table) -> None:
        group.set_one_shot(found.one_shot, found.one_shot_narrow)
        group.table = found

    # ---- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        out = self._all_reduce(x, ranks, op)
        return self.inner.all_reduce(x, ranks, op) if out is None else out

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        out = self._all_reduce(x, ranks, op)
        return self.inner.all_reduce_async(x, ranks, op) if out is None else Done(out)

    def _all_reduce(self, x: Tensor, ranks: Ranks, op: str) -> Tensor | None:
        """The sum; None where it is for the transport below."""
        group = self._group(x.device, ranks)
        if group is None or x.dtype not in (SUMMED if op == "sum" else REDUCED):
            return None
        check_op(op)
        group.meeting.meet_all_reduce(x, op)
        if not group.serves("all_reduce", x.dtype, x.nbytes, x.nbytes):
            return None
        return group.all_reduce(x, op)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        group = self._group(x.device, ranks)
        if group is None or x.dtype not in (SUMMED if op == "sum" else REDUCED):
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        check_op(op)
        group.meeting.meet_reduce_scatter(x, dim, sizes, op)
        if not group.serves("reduce_scatter", x.dtype, x.nbytes, x.nbytes):
            return self.inner.reduce_scatter(x, dim, sizes, ranks, op)
        return group.reduce_scatter(x, dim, sizes, op)

    # ---- gathers and exchanges ------------------------------------------------------------------

    def join(self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        group = self._group(x.device, ranks)
        if group is None:
            return self.inner.join(x, dim, sizes, ranks)
        group.meeting.meet_all_gather(x, dim, sizes)
        given, nbytes = (bytes_with(x, {dim: n}) for n in (max(sizes), sum(sizes)))
        if not group.serves("join", x.dtype, given, nbytes):
            return self.inner.join(x, dim, sizes, ranks)
        return group.join(x, dim, sizes)

    def turn(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        group = self._group(x.device, ranks)
        if group is None:
            return self.inner.turn(x, split_dim, split_sizes, concat_dim, concat_sizes, ranks)
        move = split_dim, split_sizes, concat_dim, concat_sizes
        group.meeting.meet_all_to_all(x, *move)
        sizes = max(concat_sizes), sum(concat_sizes)
        given, nbytes = (bytes_with(x, {concat_dim: n}) for n in sizes)
        if not group.serves("turn", x.dtype, given, nbytes):
            return self.inner.turn(x, *move, ranks)
        return group.turn(x, *move)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        place = _device(device)
        group = self._group(place, ranks)
        if group is None:
            return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        at = check_member("broadcast from source", source, ranks)
        group.meeting.meet_broadcast(x, shape, dtype, at)
        out = torch.empty(tuple(shape), dtype=dtype, device=place)
        if not group.serves("broadcast", out.dtype, out.nbytes, out.nbytes):
            return self.inner.broadcast(x, shape, dtype, device, source, ranks)
        return group.broadcast(x if source == self.rank else None, out, at)

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        group = self._group(x.device, ranks)
        if group is None:
            return self.inner.peers(x, ranks)
        group.meeting.meet_peers(x)
        if x.nbytes > group.place:
            return self.inner.peers(x, ranks)
        return _open(group.peers(x))

    def addends(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> AbstractContextManager[tuple[list[Tensor], int]]:
        # A kernel that reads all ranks' x saves writing and reading their sum.
        group = self._group(x.device, ranks)
        if group is None or x.nbytes > group.place:
            return super(Layer, self).addends(x, dim, sizes, ranks)
        group.meeting.meet_peers(x)
        return _open((group.peers(x), sum(sizes[: ranks.index(self.rank)])))


@contextmanager
def _open(what: Any) -> Iterator[Any]:
    yield what


def _device(named: torch.device | str) -> torch.device:
    """With its index."""
    device = torch.device(named)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
