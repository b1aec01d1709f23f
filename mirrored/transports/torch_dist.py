"""Ranks are processes of torch.distributed. The only file that calls its collectives.

CPU tensors travel by gloo, CUDA tensors by NCCL; without NCCL, CUDA tensors are staged on the CPU.

With gloo, gathers, all-to-alls and exchanges are batches of sends and receives on the default
group: exact bytes also for uneven pieces, empty ones skipped, no buffers to join, no group needed.
On idle cores they take as long as gloo's own collectives; with more ranks than cores, small ones
take up to three times as long. NCCL wants all ranks of a group in its first call, so there
everything is a collective on a group.

Groups are made here and not by `new_group`: lazily, only the members may take part, and with
`use_local_synchronization=True` torch 2.13 names a group by how many groups the process has seen so
far. Where that number differs between members, they wait for each other under different names.
"""

from __future__ import annotations

import atexit
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ..comm import Done, Handle, Ranks
from ..ordered import WIDER, no_order, ordered_reduce
from .checked import CheckedTransport
from .process import init_from_environment, let_workers_finish, started_by_launcher

# An all-reduce on gloo that sends at most this many bytes a rank when every rank sends all of x to
# every other does just that, and sums in order: one round of messages instead of gloo's 2(n-1), and
# no process group. Measured on two cores, µs, the best of 40, gloo's own against this:
#   n = 2   256 B 299 97    64 KiB  381 336    256 KiB  392  219    1 MiB  754 1503
#   n = 3   256 B 759 308   64 KiB  823 550    256 KiB  791  660    1 MiB 2459 4033
#   n = 4   256 B 2502 669  64 KiB 2486 985    256 KiB 2615 1676    1 MiB 3950 7348
SMALL_ALL_REDUCE = 256 * 1024


@dataclass
class _State:
    """What belongs to one default process group; gone when that group is destroyed."""

    rank: int
    size: int
    nccl: bool
    gloo: bool
    groups: dict[tuple[Ranks, str], Any] = field(default_factory=dict)


class TorchDist(CheckedTransport):
    """The ranks of torch.distributed's default process group; rank 0 of 1 when there is none."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[dist.ProcessGroup, _State] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def rank(self) -> int:
        return self._state().rank

    @property
    def size(self) -> int:
        return self._state().size

    def world(self) -> dist.ProcessGroup | None:
        """The default process group. Starts it where a launcher says how."""
        return c10d.GroupMember.WORLD or self._state() and c10d.GroupMember.WORLD

    def timeout_s(self) -> float:
        """How long a rank waits for others."""
        return _timeout("cpu").total_seconds()

    def _state(self) -> _State:
        world = dist.group.WORLD
        if world is None:
            if not started_by_launcher():
                return _ALONE
            init_from_environment()
            world = dist.group.WORLD
            assert world is not None
        state = self._states.get(world)
        if state is None:
            backends = dist.get_backend_config(world)
            state = _State(
                rank=dist.get_rank(),
                size=dist.get_world_size(),
                nccl="cuda:nccl" in backends,
                gloo="cpu:gloo" in backends,
            )
            if not self._states:
                atexit.register(let_workers_finish)
            self._states[world] = state
        return state

    def _group(self, ranks: Ranks, kind: str) -> Any:
        """What moves `kind` ("cpu", "cuda") tensors; its members are sorted, so callers permute."""
        _check_initialised(ranks)
        state, members = self._state(), tuple(sorted(ranks))
        if len(members) == state.size and (state.gloo if kind == "cpu" else state.nccl):
            return dist.group.WORLD
        group = state.groups.get((members, kind))
        if group is None:
            group = _make_group(members, kind, members.index(state.rank))
            state.groups[members, kind] = group
        return group

    def _by_nccl(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._state().nccl

    # ---- reductions -----------------------------------------------------------------------------

    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        if x.dtype.is_complex and op != "sum":
            raise no_order(x.dtype, op)
        nccl = self._by_nccl(x.device)
        if not nccl and x.nbytes * (len(ranks) - 1) <= SMALL_ALL_REDUCE:
            pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in ranks]
            self._all_gather(x, pieces, ranks)
            return Done(ordered_reduce(pieces, op))
        if op != "sum" and x.dtype.is_floating_point:  # gloo and NCCL lose NaN on the way
            return Done(self._fold(x, ranks, op))
        wire = x if nccl else x.cpu()
        wire, op = _reducible(wire.contiguous(), op)
        group = self._group(ranks, "cuda" if nccl else "cpu")
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        options = dist.AllreduceOptions()
        options.reduceOp = ops[op]  # type: ignore[assignment]
        return _Reducing(group.allreduce([wire], options), wire, x)

    def _fold(self, x: Tensor, ranks: Ranks, op: str) -> Tensor:
        """Each rank combines a part of all, and the parts are gathered: a reduction's bytes."""
        parts = x.reshape(-1).tensor_split(len(ranks))
        received = [torch.empty_like(parts[ranks.index(self.rank)]) for _ in ranks]
        self._all_to_all(parts, received, ranks)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        places = out.view(-1).tensor_split(len(ranks))
        self._all_gather(ordered_reduce(received, op), places, ranks)
        return out

    # ---- gathers and exchanges ------------------------------------------------------------------

    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        if self._by_nccl(x.device):
            # With unequal pieces torch makes this one batch of NCCL broadcasts: exact bytes too.
            flat = [_flat(out[k]) for k in _sorted_positions(ranks)]
            self._group(ranks, "cuda").allgather([flat], [_flat(x)]).wait()
        else:
            self._swap([x.contiguous()] * len(ranks), out, ranks)

    def _all_to_all(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        if self._by_nccl(out[0].device):
            order = _sorted_positions(ranks)
            self._trade([_flat(pieces[k]) for k in order], [_flat(out[k]) for k in order], ranks)
        else:
            self._swap(pieces, out, ranks)

    def _trade(self, going: Sequence[Tensor], coming: Sequence[Tensor], ranks: Ranks) -> None:
        """By NCCL, bytes `going[k]` to the k-th of the sorted `ranks` and `coming[k]` from it."""
        self._group(ranks, "cuda").alltoall(list(coming), list(going)).wait()

    def _swap(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        """By gloo, every `pieces[k]` to `ranks[k]` and `out[k]` from it; empty ones stay."""
        own = ranks.index(self.rank)
        out[own].copy_(pieces[own])
        # Each starts with its right-hand neighbour, so that not all send to the same one first.
        others = [(own + k) % len(ranks) for k in range(1, len(ranks))]
        self._send_and_receive(
            [(ranks[k], pieces[k]) for k in others if pieces[k].numel()],
            [(ranks[k], out[k]) for k in others if out[k].numel()],
            ranks,
        )

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        if not self._by_nccl(device):
            self._send_and_receive(sends, out, ranks)
            return
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        members = sorted(ranks)
        going = [torch.cat([empty, *(_flat(x) for to, x in sends if to == r)]) for r in members]
        places = [[_flat(x) for source, x in out if source == r] for r in members]
        coming = [torch.cat([empty, *place]) for place in places]
        self._trade(going, coming, ranks)
        for place, piece in zip(places, coming, strict=True):
            for x, part in zip(place, piece.split([x.numel() for x in place]), strict=True):
                x.copy_(part)

    def _send_and_receive(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
    ) -> None:
        """A batch of gloo messages; between two ranks they match in order.

        They need no group of `ranks`, unless the default group lacks gloo.
        """
        if not sends and not out:
            return
        state = self._state()
        everyone = tuple(range(state.size)) if state.gloo else tuple(sorted(ranks))
        group = self._group(everyone if state.gloo else ranks, "cpu")
        received = [x if x.is_cpu else torch.empty_like(x, device="cpu") for _, x in out]
        works = [
            group.recv([_flat(x)], everyone.index(source), 0)
            for (source, _), x in zip(out, received, strict=True)
        ]
        # The list keeps what is sent alive until it has gone.
        sent = [(to, _flat(x.cpu())) for to, x in sends]
        works += [group.send([x], everyone.index(to), 0) for to, x in sent]
        for work in works:
            work.wait()
        for (_, x), arrived in zip(out, received, strict=True):
            if arrived is not x:
                x.copy_(arrived)

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        nccl = self._by_nccl(x.device)
        wire = x if nccl else x.cpu()
        options = dist.BroadcastOptions()
        options.rootRank = sorted(ranks).index(source)
        self._group(ranks, "cuda" if nccl else "cpu").broadcast([_flat(wire)], options).wait()
        if wire is not x:
            x.copy_(wire)

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([own.numel()])
        sizes = [torch.empty_like(size) for _ in ranks]
        self._all_gather(size, sizes, ranks)
        out = [torch.empty(int(n), dtype=torch.uint8) for n in sizes]
        self._all_gather(own, out, ranks)
        return [pickle.loads(bytes(piece.tolist())) for piece in out]


class _Reducing:
    """A reduction under way in `wire`, to be handed back like `x`."""

    def __init__(self, work: Any, wire: Tensor, x: Tensor) -> None:
        self.work, self.wire, self.like = work, wire, x

    def wait(self) -> Tensor:
        self.work.wait()
        x, wire = self.like, self.wire
        if x.dtype.is_complex:
            wire = torch.view_as_complex(wire)
        elif x.dtype == torch.bool:
            wire = wire.view(torch.bool)
        return wire.to(device=x.device, dtype=x.dtype)


def _reducible(x: Tensor, op: str) -> tuple[Tensor, str]:
    """`x` and `op` in terms that gloo and NCCL can reduce."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8), "min" if op == "min" else "max"
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj()), op
    return x.to(WIDER.get(x.dtype, x.dtype)), op


def _make_group(members: Ranks, kind: str, position: int) -> Any:
    """A gloo or NCCL group of `members`, which find each other under a name all of them know."""
    store = c10d.PrefixStore(f"mirrored/{kind}/{members}", c10d._get_default_store())
    timeout = _timeout(kind)
    if kind == "cpu":
        return dist.ProcessGroupGloo(store, position, len(members), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, position, len(members), options)


def _timeout(kind: str) -> timedelta:
    """How long the default group waits, so that the groups made here wait as long."""
    world = dist.group.WORLD
    assert world is not None
    try:
        return world._get_backend(torch.device(kind)).options._timeout  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return c10d.default_pg_timeout  # no back end for this kind in the default group


def _sorted_positions(ranks: Ranks) -> list[int]:
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def _flat(x: Tensor) -> Tensor:
    """The bytes of `x` in one dim, sharing memory if `x` is contiguous. Every dtype travels so."""
    x = x.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride along a dim of size 1, and `view` would keep it.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


_ALONE = _State(rank=0, size=1, nccl=False, gloo=False)


def _check_initialised(ranks: Sequence[int]) -> None:
    if ranks and not dist.is_initialized():
        raise RuntimeError(
            f"torch.distributed is not initialised, and ranks {tuple(ranks)} are to communicate.\n"
            "  Without it this process is rank 0 of 1 and reaches no other rank.\n"
            '  Call torch.distributed.init_process_group("gloo") first, or start under torchrun.'
        )
