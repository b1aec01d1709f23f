"""Ranks are processes of torch.distributed. This is the only file that calls its collectives.

CPU tensors are sent by gloo, CUDA tensors by NCCL; without NCCL, CUDA tensors are staged on the
CPU.

With gloo, gathers, all-to-alls and exchanges are batches of sends and receives on the default
group. They send exactly the bytes needed, for uneven pieces too, skip empty pieces, and need no
buffers to join and no group. On idle cores they take as long as gloo's own collectives; with more
ranks than cores, small ones take up to three times as long. NCCL needs all ranks of a group in its
first call, so there everything is a collective on a group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ...comm import Done, Handle, Ranks
from ...reduction import WIDER, ordered_reduce
from ..faults.watch import Watch
from . import messages
from .described import Described
from .groups import timeout, world
from .messages import flat

# In an all-reduce on gloo every rank sends all of x to all others, and sums in order, if it then
# sends at most this many bytes. That takes one round of messages instead of gloo's 2(n-1), and no
# process group. Measured on two cores, in µs, the best of 40, gloo's own and then this:
#   n = 2   256 B 299 97    64 KiB  381 336    256 KiB  392  219    1 MiB  754 1503
#   n = 3   256 B 759 308   64 KiB  823 550    256 KiB  791  660    1 MiB 2459 4033
#   n = 4   256 B 2502 669  64 KiB 2486 985    256 KiB 2615 1676    1 MiB 3950 7348
SMALL_ALL_REDUCE = 256 * 1024

# What gloo's own all-reduce combines, in a wider dtype if need be. Sums of other floats, which are
# short, it would round at each step.
_BY_GLOO = frozenset(
    (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)
    + (torch.int64, torch.float32, torch.float64, torch.complex64, torch.complex128)
)


class TorchDist(Described):
    """The ranks of torch.distributed's default process group; rank 0 of 1 when there is none."""

    @property
    def rank(self) -> int:
        return world().rank

    @property
    def size(self) -> int:
        return world().size

    def world(self) -> dist.ProcessGroup | None:
        """The default process group, started if a launcher says how; None in a child of a rank."""
        return None if world().is_childs else c10d.GroupMember.WORLD

    def timeout_s(self) -> float:
        """How many seconds a rank waits for others."""
        return timeout("cpu").total_seconds()

    def agreed(self, name: str, make: Callable[[], str]) -> str:
        """What `make` returned on the first rank that asked; no rank waits for another."""
        return world().agreed(name, make)

    @property
    def watch(self) -> Watch:
        """What this rank does when it waits in vain. Only for a world of several ranks."""
        found = world().watch
        assert found is not None
        return found

    def check(self, what: str, ranks: Ranks, *tensors: Tensor) -> int:
        world().check_reachable(ranks)
        return super().check(what, ranks, *tensors)

    def shares(self, ranks: Ranks, kind: str) -> bool:
        world().check_reachable(ranks)
        return False

    def abandon(self, why: str) -> bool:
        watch = world().watch
        if watch is not None:
            watch.give_up(why)
        return watch is not None

    # ---- reductions -----------------------------------------------------------------------------

    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        name, nccl = f"all_reduce({op})", _by_nccl(x.device)
        if not nccl and x.nbytes * (len(ranks) - 1) <= SMALL_ALL_REDUCE:
            pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in ranks]
            self._gather(name, x, pieces, ranks)
            return Done(ordered_reduce(pieces, op))
        # Gloo and NCCL may lose a NaN.
        if (x.dtype.is_floating_point and op != "sum") or (x.dtype not in _BY_GLOO and not nccl):
            return Done(self._fold(name, x, ranks, op))
        if not nccl:
            # Gloo's own carries no tag. It ends the process if sizes differ, and adds up wrong
            # numbers if dtypes do.
            messages.agree(name, x, ranks)
        wire = x if nccl else x.cpu()
        wire, op = _reducible(wire.contiguous(), op)
        group = world().group(ranks, "cuda" if nccl else "cpu")
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        options = dist.AllreduceOptions()
        options.reduceOp = ops[op]  # type: ignore[assignment]
        start = partial(group.allreduce, [wire], options)
        work = world().carry_out(name, x, ranks, start)
        return _Reducing(name, work, wire, x, ranks)

    def _fold(self, name: str, x: Tensor, ranks: Ranks, op: str) -> Tensor:
        """Each rank combines one part of every rank's x, then the parts are gathered. This sends as
        many bytes as a ring all-reduce."""
        parts = x.reshape(-1).tensor_split(len(ranks))
        received = [torch.empty_like(parts[ranks.index(self.rank)]) for _ in ranks]
        self._trade(name, parts, received, ranks)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        places = out.view(-1).tensor_split(len(ranks))
        self._gather(name, ordered_reduce(received, op), places, ranks)
        return out

    # ---- gathers and exchanges ------------------------------------------------------------------

    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        self._gather("all_gather", x, out, ranks)

    def _gather(self, name: str, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        if not _by_nccl(x.device):
            messages.swap(name, [x.contiguous()] * len(ranks), out, ranks)
            return
        # If pieces differ in size, torch makes this a batch of NCCL broadcasts of the exact bytes.
        pieces = [flat(out[k]) for k in _sorted_positions(ranks)]
        group = world().group(ranks, "cuda")
        start = partial(group.allgather, [pieces], [flat(x)])
        world().carry_out(name, x, ranks, lambda: start().wait())

    def _all_to_all(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        self._trade("all_to_all", pieces, out, ranks)

    def _trade(
        self, name: str, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
    ) -> None:
        if not _by_nccl(out[0].device):
            messages.swap(name, pieces, out, ranks)
            return
        order = _sorted_positions(ranks)
        going, coming = ([flat(part[k]) for k in order] for part in (pieces, out))
        group = world().group(ranks, "cuda")
        start = partial(group.alltoall, coming, going)
        world().carry_out(name, pieces[0], ranks, lambda: start().wait())

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        if not _by_nccl(device):
            first = next((x for _, x in (*sends, *out)), empty)
            messages.send_and_receive("exchange", first, sends, out, ranks)
            return
        going = [torch.cat([empty, *(flat(x) for to, x in sends if to == r)]) for r in ranks]
        places = [[flat(x) for source, x in out if source == r] for r in ranks]
        coming = [torch.cat([empty, *place]) for place in places]
        self._trade("exchange", going, coming, ranks)
        for place, piece in zip(places, coming, strict=True):
            for x, part in zip(place, piece.split([x.numel() for x in place]), strict=True):
                x.copy_(part)

    def _send(self, x: Tensor, to: int, label: str) -> Handle:
        return messages.sending(label, x, to)

    def _receive(self, out: Tensor, source: int, label: str) -> Handle:
        return messages.receiving(label, out, source)

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        if not _by_nccl(x.device):
            wire = x.cpu()
            messages.broadcast(wire, source, ranks)
            if wire is not x:
                x.copy_(wire)
            return
        options = dist.BroadcastOptions()
        options.rootRank = sorted(ranks).index(source)
        group = world().group(ranks, "cuda")
        start = partial(group.broadcast, [flat(x)], options)
        world().carry_out("broadcast", x, ranks, lambda: start().wait())

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([own.numel()])
        sizes = [torch.empty_like(size) for _ in ranks]
        self._gather("gather_objects", size, sizes, ranks)
        out = [torch.empty(int(n), dtype=torch.uint8) for n in sizes]
        self._gather("gather_objects", own, out, ranks)
        return [pickle.loads(bytes(piece.tolist())) for piece in out]


class _Reducing:
    """A reduction under way in `wire`; `wait()` returns it with the device and dtype of `x`."""

    def __init__(self, name: str, work: Any, wire: Tensor, x: Tensor, ranks: Ranks) -> None:
        self.name, self.work, self.wire, self.like, self.ranks = name, work, wire, x, ranks

    def wait(self) -> Tensor:
        x, wire = self.like, self.wire
        world().check_reachable(self.ranks)
        # Without the wait `wire` would be read while the reduction still writes it.
        world().carry_out(self.name, x, self.ranks, self.work.wait)
        if x.dtype.is_complex:
            wire = torch.view_as_complex(wire)
        elif x.dtype == torch.bool:
            wire = wire.view(torch.bool)
        return wire.to(device=x.device, dtype=x.dtype)


def _reducible(x: Tensor, op: str) -> tuple[Tensor, str]:
    """`x` and `op` as a dtype and an op that gloo and NCCL can reduce."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8), "min" if op == "min" else "max"
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj()), op
    return x.to(WIDER.get(x.dtype, x.dtype)), op


def _by_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and world().nccl


def _sorted_positions(ranks: Ranks) -> list[int]:
    return sorted(range(len(ranks)), key=ranks.__getitem__)
