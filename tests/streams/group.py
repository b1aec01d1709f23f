"""NCCL's groups and the transport over them, for `stand_ins.py`: collectives are noted, and gloo
moves the bytes at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mirrored import Ranks
from mirrored.reduction import ordered_reduce
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.torch_dist.messages import as_bytes
from tests.streams.cuda import Cuda
from tests.streams.noted import Log

CPU = torch.device("cpu")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work:
    """What a collective returns. As in NCCL's group, it keeps the tensors until `wait`."""

    def __init__(self, log: Log, cuda: Cuda, what: tuple, held: list[Tensor]) -> None:
        self._log, self._cuda, self._what, self._held = log, cuda, what, held

    def wait(self) -> None:
        """The current stream waits; the process does not."""
        self._log.note("join", self._cuda.current_stream().name, self._what)
        self._held = []


class Communicator:
    """What the code uses of `ProcessGroupNCCL`, for the ranks `members`, which are sorted."""

    def __init__(self, log: Log, cuda: Cuda, members: Ranks) -> None:
        self._log, self._cuda, self._members = log, cuda, members
        self._me = members.index(dist.get_rank())

    def _start(self, name: str, reads: list[Tensor], writes: list[Tensor], all_see: Any) -> Work:
        stream, comm = self._cuda.current_stream().name, f"nccl {self._members}"
        what = comm, self._log.count(comm), f"{name} {all_see}"
        read, written = (self._log.numbers(xs, stream) for xs in (reads, writes))
        self._log.note("start", stream, what, reads=read, writes=written)
        return Work(self._log, self._cuda, what, [*reads, *writes])

    def allreduce(self, xs: list[Tensor], options: Any) -> Work:
        (x,) = xs
        op = next(name for name, each in _OPS.items() if options.reduceOp == each)
        work = self._start("allreduce", xs, xs, (op, x.dtype, tuple(x.shape)))
        with _disable_current_modes():
            pieces = [torch.empty_like(x) for _ in self._members]
            self._swap([x] * len(pieces), pieces)
            x.copy_(ordered_reduce(pieces, op))
        return work

    def allgather(self, out: list[list[Tensor]], xs: list[Tensor]) -> Work:
        work = self._start("allgather", xs, out[0], [x.numel() for x in out[0]])
        with _disable_current_modes():
            self._swap([xs[0]] * len(out[0]), out[0])
        return work

    def alltoall(self, out: list[Tensor], xs: list[Tensor]) -> Work:
        work = self._start("alltoall", xs, out, "")
        with _disable_current_modes():
            self._swap(xs, out)
        return work

    def broadcast(self, xs: list[Tensor], options: Any) -> Work:
        (x,), root = xs, options.rootRank
        work = self._start("broadcast", xs, xs, (root, x.numel()))
        with _disable_current_modes():
            if self._me == root:
                self._swap([x] * len(self._members), [x[:0]] * len(self._members))
            else:
                out = [x if k == root else x[:0] for k in range(len(self._members))]
                self._swap([x[:0]] * len(self._members), out)
        return work

    def _swap(self, pieces: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """``pieces[k]`` goes to member k, and ``out[k]`` is filled from it."""
        world: Any = dist.group.WORLD
        works = []
        for k, rank in enumerate(self._members):
            if k == self._me:
                if out[k].numel():
                    out[k].copy_(pieces[k])
                continue
            if pieces[k].numel():
                works.append(world.send([as_bytes(pieces[k])], rank, 7))
            if out[k].numel():
                works.append(world.recv([as_bytes(out[k])], rank, 7))
        for work in works:
            work.wait()


class OnGpu(TorchDist):
    """Tensors are in main memory, and its collectives are those of GPUs."""

    def __init__(self, log: Log, cuda: Cuda) -> None:
        super().__init__()
        self._log, self._cuda, self.at_host = log, cuda, threading.local()

    def device(self, kind: str) -> torch.device:
        return CPU

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        self._meet("gather_objects", ranks)
        with self.in_main_memory():
            return super()._gather_objects(obj, ranks)

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        if len(ranks) > 1:
            self._meet("gather_notes", ranks)
        with self.in_main_memory():
            return super().gather_notes(note, ranks)

    def _send(self, x: Tensor, to: int, label: str) -> Any:
        stream = self._cuda.current_stream().name
        self._log.note("op", stream, "to host", reads=self._log.numbers([x], stream))
        self._log.note("sync", stream)
        return super()._send(x, to, label)

    def _receive(self, out: Tensor, source: int, label: str) -> Any:
        handle = super()._receive(out, source, label)
        return _Arriving(handle, out, self._log, self._cuda)

    def _meet(self, name: str, ranks: Ranks) -> None:
        if not getattr(self.at_host, "now", False):
            comm = f"host {tuple(ranks)}"
            self._log.note("meet", "", (comm, self._log.count(comm), name))

    @contextmanager
    def in_main_memory(self) -> Iterator[None]:
        """Inside, messages of this thread are those of the host, and nothing is noted."""
        before = getattr(self.at_host, "now", False)
        self.at_host.now = True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.at_host.now = before

    def by_nccl(self, device: torch.device) -> bool:
        return not getattr(self.at_host, "now", False)


class _Arriving:
    def __init__(self, handle: Any, out: Tensor, log: Log, cuda: Cuda) -> None:
        self._handle, self._out, self._log, self._cuda = handle, out, log, cuda

    def wait(self) -> Any:
        found, stream = self._handle.wait(), self._cuda.current_stream().name
        self._log.note("op", stream, "from host", writes=self._log.numbers([self._out], stream))
        return found
