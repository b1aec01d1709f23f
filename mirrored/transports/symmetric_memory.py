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
where GPUs don't reach each other (one warning), where processes share no segment, and with
CONSISTENT_SHARED_MEMORY=0.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import Done, Handle, Ranks, Shape, check_member, check_op
from ..symmetric import Peers
from . import _C, segments, tune  # pyright: ignore[reportAttributeAccessIssue]
from .layer import Layer
from .shared_memory import REDUCED, SUMMED, SharedMemory, bytes_with
from .table import Table

PLACE = 16 * 1024 * 1024  # bytes a rank gives at once, twice
MOST_RANKS = 32  # csrc/peer/device_moves.h
_ALIGNED = 16  # bytes that a kernel moves at once


class DeviceMemory(Protocol):
    """What `Peers` is: memory of each rank, and what orders the devices' work on it."""

    memory: list[Tensor]

    def begin(self) -> None: ...
    def barrier(self, timeout_s: float) -> None: ...


Make = Callable[[int, torch.device, Ranks, int, str], DeviceMemory]


class Group:
    """Ranks that read each other's places. Every method is a call that all of them make."""

    def __init__(
        self, peers: DeviceMemory, meeting: Any, at: int, place: int, timeout_s: float
    ) -> None:
        self.meeting, self.place, self.table = meeting, place, Table()
        self._peers, self._at, self._timeout_s = peers, at, timeout_s
        self._places = [[m[k * place : (k + 1) * place] for m in peers.memory] for k in (0, 1)]
        self._step = 0
        self._one_shot = Table().one_shot, Table().one_shot_narrow
        self._lock = threading.Lock()

    def set_one_shot(self, nbytes: int, narrow: int) -> None:
        """All-reduces up to so many bytes send all to all; `narrow` is for floats of two bytes."""
        self._one_shot = nbytes, narrow

    def serves(self, move: str, dtype: torch.dtype, given: int, nbytes: int) -> bool:
        """Whether a move of `nbytes`, of which a rank gives `given` at most, goes by the places: a
        question of what the headers have shown to be the same on all ranks."""
        return given <= self.place and not self.table.by_messages(move, dtype, nbytes)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat, n = out.view(-1), x.numel()
        with self._lock:
            places = self._give(x)
            if x.nbytes <= self._one_shot[x.dtype in (torch.float16, torch.bfloat16)]:
                _C.reduce(places, [n], 0, 0, flat, op)
                return out
            sizes = _parts(n, len(places), x.element_size())
            own, results = sizes[self._at], self._next()
            mine = _as(results[self._at], (own,), x.dtype)
            _C.reduce(places, [n], 0, sum(sizes[: self._at]), mine, op)
            self._peers.barrier(self._timeout_s)
            _C.collect(results, flat, 0, sizes, -1, 0, 0)
        return out

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> Tensor:
        dim, start = dim % x.dim(), sum(sizes[: self._at])
        out = x.new_empty(_with(x.shape, {dim: sizes[self._at]}))
        with self._lock:
            _C.reduce(self._give(x), list(x.shape), dim, start, out, op)
        return out

    def join(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        dim = dim % x.dim()
        out = x.new_empty(_with(x.shape, {dim: sum(sizes)}))
        with self._lock:
            _C.collect(self._give(x), out, dim, list(sizes), -1, 0, 0)
        return out

    def turn(
        self, x: Tensor, split: int, split_sizes: Sequence[int], dim: int, sizes: Sequence[int]
    ) -> Tensor:
        split, dim = split % x.dim(), dim % x.dim()
        start, own = sum(split_sizes[: self._at]), split_sizes[self._at]
        out = x.new_empty(_with(x.shape, {split: own, dim: sum(sizes)}))
        with self._lock:
            _C.collect(self._give(x), out, dim, list(sizes), split, start, x.shape[split])
        return out

    def broadcast(self, x: Tensor | None, out: Tensor, source: int) -> Tensor:
        with self._lock:
            place = self._give(x)[source]
            _C.collect([place], out.view(-1), 0, [out.numel()], -1, 0, 0)
        return out

    def peers(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, to be read before the next call but one, on this stream."""
        with self._lock:
            return [_as(place, x.shape, x.dtype) for place in self._give(x)]

    def _next(self) -> list[Tensor]:
        """The places of this step: all have read what was there two steps ago, for the barrier of
        the step between came after it."""
        self._step += 1
        return self._places[self._step % 2]

    def _give(self, x: Tensor | None) -> list[Tensor]:
        self._peers.begin()
        places = self._next()
        if x is not None:
            _as(places[self._at], x.shape, x.dtype).copy_(x.detach())
        self._peers.barrier(self._timeout_s)
        return places


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
        self._groups: dict[tuple[Ranks, torch.device], tuple[Any, Group | None]] = {}
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

    def _group(self, device: torch.device, ranks: Ranks) -> Group | None:
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

    def _make(self, meeting: Any, device: torch.device, ranks: Ranks) -> Group | None:
        if len(ranks) > MOST_RANKS:
            return None
        at, timeout_s = ranks.index(self.rank), self.inner.inner.timeout_s()
        name = self.gather_objects(f"mirrored/{uuid.uuid4()}", ranks)[0]
        peers, fault = None, ""
        try:
            with torch.inference_mode(False):  # the memory is written in every mode later
                peers = self._make_peers(2 * self.place, device, ranks, at, name)
        except RuntimeError as error:
            fault = str(error).partition("\n")[0]
        faults = [each for each in self.gather_objects(fault, ranks) if each]
        if peers is None or faults:
            segments.warn(ranks, "the memory of their devices", faults[0], "Give them peer access")
            return None
        return Group(peers, meeting, at, self.place, timeout_s)

    def _tried(self, group: Group, device: torch.device, ranks: Ranks) -> tune.Tried:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return tune.Tried(self, self.inner, ranks, device, name, group.set_one_shot)

    def _use(self, group: Group, found: Table) -> None:
        group.set_one_shot(found.one_shot, found.one_shot_narrow)
        group.table = found

    # ---- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        group = self._group(x.device, ranks)
        if group is None or x.dtype not in (SUMMED if op == "sum" else REDUCED):
            return self.inner.all_reduce(x, ranks, op)
        check_op(op)
        group.meeting.meet_all_reduce(x, op)
        if not group.serves("all_reduce", x.dtype, x.nbytes, x.nbytes):
            return self.inner.all_reduce(x, ranks, op)
        return group.all_reduce(x, op)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        group = self._group(x.device, ranks)
        if group is None or x.dtype not in (SUMMED if op == "sum" else REDUCED):
            return self.inner.all_reduce_async(x, ranks, op)
        check_op(op)
        group.meeting.meet_all_reduce(x, op)
        if not group.serves("all_reduce", x.dtype, x.nbytes, x.nbytes):
            return self.inner.all_reduce_async(x, ranks, op)
        return Done(group.all_reduce(x, op))

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


def _with(shape: Shape, sizes: dict[int, int]) -> list[int]:
    return [sizes.get(dim, size) for dim, size in enumerate(shape)]


def _as(place: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The start of a place, as a tensor."""
    return place[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _parts(n: int, count: int, itemsize: int) -> list[int]:
    """n elements in `count` parts, each of which begins where a kernel's unit does."""
    unit = max(1, _ALIGNED // itemsize)
    each = -(-n // (count * unit)) * unit
    return [max(0, min(each, n - k * each)) for k in range(count)]
