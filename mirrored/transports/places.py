"""Moves between devices that read each other's memory: put, meet, make the result of all places."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import Shape
from . import _C  # pyright: ignore[reportAttributeAccessIssue]
from .table import Table

_ALIGNED = 16  # bytes that a kernel moves at once


class DeviceMemory(Protocol):
    """What `Peers` is: memory of each rank, and what orders the devices' work on it."""

    memory: list[Tensor]

    def begin(self) -> None: ...
    def barrier(self, timeout_s: float) -> None: ...


class Places:
    """What ranks do with places of memory that all of them read: two of each rank, used in turn.
    Every method is a call that all of them make."""

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

    def tried(self, device: torch.device) -> Places:
        """These, after each move of small numbers. Raises RuntimeError if one comes out wrong."""
        n, me = len(self._places[0]), self._at
        rows, columns, one = [k + 1 for k in range(n)], [2] * n, torch.float32
        size = sum(rows) * 2 * n
        whole = torch.arange(size, dtype=one, device=device).view(sum(rows), 2 * n)
        total = whole * n + n * (n - 1) / 2
        self._one_shot, limits = (0, 0), self._one_shot
        found = {
            "all-reduce": (self.all_reduce(whole + me, "sum"), total),
            "reduce-scatter": (
                self.reduce_scatter(whole + me, 1, columns, "sum"),
                total.split(columns, 1)[me],
            ),
            "all-gather": (self.join(whole.split(rows)[me], 0, rows), whole),
            "all-to-all": (
                self.turn(whole.split(rows)[me], 1, columns, 0, rows),
                whole.split(columns, 1)[me],
            ),
            "broadcast": (
                self.broadcast(whole + me, whole.new_empty(whole.shape), n - 1),
                whole + n - 1,
            ),
        }
        self._one_shot = limits
        found["short all-reduce"] = self.all_reduce(whole + me, "sum"), total
        wrong = [move for move, (made, wanted) in found.items() if not torch.equal(made, wanted)]
        if wrong:
            raise RuntimeError(f"a trial of {', '.join(wrong)} came out wrong")
        return self

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
