"""Collectives between devices that read each other's memory.

Each rank copies its tensor into its own slot (a buffer that all devices can read), the devices meet
in a barrier, and each computes its result from the slots of all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ...comm import Shape
from .. import _C  # pyright: ignore[reportAttributeAccessIssue]
from ..tuning.table import Table

_ALIGNMENT = 16  # bytes that a kernel moves at once


class DeviceMemory(Protocol):
    """Protocol of memory that several ranks' devices share, with a barrier between them.

    ``memory[k]`` is the memory of the k-th rank of the group. ``begin`` and ``end`` are called
    around the work of each collective. ``GpuMemory`` implements it.
    """

    memory: list[Tensor]

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def barrier(self, timeout_s: float) -> None: ...


class DeviceMoves:
    """Collectives through shared device memory, in which each rank has two slots, used in turn.

    All ranks make the same calls. A *step* is one use of a slot: write it, barrier, read the slots
    of all ranks.

    Args:
        memory: the shared memory, of at least two slots for each rank.
        meeting: the ranks' segment of shared CPU memory (``_C.Group``), in which the caller
            compares the calls of all ranks before each collective.
        at: the position of this rank in the group.
        slot_bytes: the size of a slot.
        timeout_s: how long a barrier waits for other ranks.
    """

    def __init__(
        self, memory: DeviceMemory, meeting: Any, at: int, slot_bytes: int, timeout_s: float
    ) -> None:
        self.meeting, self.slot_bytes, self.table = meeting, slot_bytes, Table()
        self._memory, self._position, self._timeout_s = memory, at, timeout_s
        parts = slice(slot_bytes), slice(slot_bytes, 2 * slot_bytes)
        self._slots = [[whole[part] for whole in memory.memory] for part in parts]
        self._step = 0
        self._one_shot_limits = Table().one_shot, Table().one_shot_narrow
        self._lock = threading.RLock()

    def set_one_shot(self, nbytes: int, narrow: int) -> None:
        """Set the size in bytes up to which an all-reduce is done in one step.

        In one step every rank reads all of ``x`` from all others. Larger ones take two: each rank
        sums a part, and the parts are gathered. ``narrow`` is the limit for float16 and bfloat16,
        ``nbytes`` that for other dtypes.
        """
        self._one_shot_limits = nbytes, narrow

    def serves(self, move: str, dtype: torch.dtype, given: int, nbytes: int) -> bool:
        """Return whether this object should carry out a collective, and not messages.

        It should if what a rank writes fits in a slot, and messages are not faster by the table.
        The arguments, and so the answer, are the same on all ranks.

        Args:
            move: the name of the collective.
            dtype: the dtype of the tensor.
            given: the most bytes that a rank writes.
            nbytes: the bytes of the logical tensor.
        """
        return given <= self.slot_bytes and not self.table.by_messages(move, dtype, nbytes)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat, n = out.view(-1), x.numel()
        with self._exclusive_steps():
            slots = self._write_slot(x)
            if x.nbytes <= self._one_shot_limits[x.dtype in (torch.float16, torch.bfloat16)]:
                _C.reduce(slots, [n], 0, 0, flat, op)
                return out
            sizes = _aligned_parts(n, len(slots), x.element_size())
            own_size, results = sizes[self._position], self._next_slots()
            own_part = _slot_view(results[self._position], (own_size,), x.dtype)
            _C.reduce(slots, [n], 0, sum(sizes[: self._position]), own_part, op)
            # Without this barrier, other ranks' parts would be read before their GPUs have summed
            # them.
            self._memory.barrier(self._timeout_s)
            _C.collect(results, flat, 0, sizes, -1, 0, 0)
        return out

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> Tensor:
        dim, start = dim % x.dim(), sum(sizes[: self._position])
        out = x.new_empty(_shape_with(x.shape, {dim: sizes[self._position]}))
        with self._exclusive_steps():
            _C.reduce(self._write_slot(x), list(x.shape), dim, start, out, op)
        return out

    def all_gather_into_tensor(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        dim = dim % x.dim()
        out = x.new_empty(_shape_with(x.shape, {dim: sum(sizes)}))
        with self._exclusive_steps():
            _C.collect(self._write_slot(x), out, dim, list(sizes), -1, 0, 0)
        return out

    def all_to_all_single(
        self, x: Tensor, split: int, split_sizes: Sequence[int], dim: int, sizes: Sequence[int]
    ) -> Tensor:
        split, dim = split % x.dim(), dim % x.dim()
        start, own_size = sum(split_sizes[: self._position]), split_sizes[self._position]
        out = x.new_empty(_shape_with(x.shape, {split: own_size, dim: sum(sizes)}))
        with self._exclusive_steps():
            _C.collect(self._write_slot(x), out, dim, list(sizes), split, start, x.shape[split])
        return out

    def broadcast(self, x: Tensor | None, out: Tensor, source: int) -> Tensor:
        with self._exclusive_steps():
            # Every rank takes the step and its barrier, but only the source writes.
            source_slot = self._write_slot(x)[source]
            _C.collect([source_slot], out.view(-1), 0, [out.numel()], -1, 0, 0)
        return out

    @contextmanager
    def peers(self, x: Tensor) -> Iterator[list[Tensor]]:
        """Yield every rank's x, to be read inside the block, by work on the current stream."""
        with self._exclusive_steps():
            yield [_slot_view(slot, x.shape, x.dtype) for slot in self._write_slot(x)]

    def self_tested(self, device: torch.device) -> DeviceMoves:
        """Test each collective on small tensors on ``device``, and return this object.

        A collective. Raises RuntimeError if a result is wrong.
        """
        n, index = len(self._slots[0]), self._position
        rows, columns, dtype = [k + 1 for k in range(n)], [2] * n, torch.float32
        size = sum(rows) * 2 * n
        whole = torch.arange(size, dtype=dtype, device=device).view(sum(rows), 2 * n)
        total = whole * n + n * (n - 1) / 2
        # First the all-reduce in two steps, which so few numbers would not take.
        self._one_shot_limits, limits = (0, 0), self._one_shot_limits
        results = {
            "all-reduce": (self.all_reduce(whole + index, "sum"), total),
            "reduce-scatter": (
                self.reduce_scatter(whole + index, 1, columns, "sum"),
                total.split(columns, 1)[index],
            ),
            "all-gather": (self.all_gather_into_tensor(whole.split(rows)[index], 0, rows), whole),
            "all-to-all": (
                self.all_to_all_single(whole.split(rows)[index], 1, columns, 0, rows),
                whole.split(columns, 1)[index],
            ),
            "broadcast": (
                self.broadcast(whole + index, whole.new_empty(whole.shape), n - 1),
                whole + n - 1,
            ),
        }
        self._one_shot_limits = limits
        results["short all-reduce"] = self.all_reduce(whole + index, "sum"), total
        wrong_moves = [
            move
            for move, (result, expected) in results.items()
            if not torch.equal(result, expected)
        ]
        if wrong_moves:
            raise RuntimeError(f"a trial of {', '.join(wrong_moves)} came out wrong")
        return self

    @contextmanager
    def _exclusive_steps(self) -> Iterator[None]:
        """Context manager around the steps of one collective: one thread at a time runs them.

        They are also ordered after the steps that ran before on another CUDA stream.
        """
        with self._lock:
            self._memory.begin()
            try:
                yield
            finally:
                self._memory.end()

    def _next_slots(self) -> list[Tensor]:
        """Return all ranks' slots for the next step.

        They may be overwritten. They were last used two steps ago, and all ranks had read them
        before they passed the barrier of the step in between.
        """
        self._step += 1
        return self._slots[self._step % 2]

    def _write_slot(self, x: Tensor | None) -> list[Tensor]:
        """Begin a step: copy ``x`` into this rank's slot, and return all ranks' slots to read.

        With None this rank writes nothing.
        """
        slots = self._next_slots()
        if x is not None:
            _slot_view(slots[self._position], x.shape, x.dtype).copy_(x.detach())
        # Without this barrier the slots of other ranks would be read before their GPUs have written
        # them, and in the next step a slot would be written while another rank still reads it.
        self._memory.barrier(self._timeout_s)
        return slots


def _shape_with(shape: Shape, sizes: dict[int, int]) -> list[int]:
    return [sizes.get(dim, size) for dim, size in enumerate(shape)]


def _slot_view(slot: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the start of a slot as a tensor of ``shape`` and ``dtype``."""
    return slot[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _aligned_parts(n: int, count: int, itemsize: int) -> list[int]:
    """Return the sizes of ``count`` parts of n elements, each beginning at a multiple of 16 bytes.

    ``_aligned_parts(10, 2, 4) -> [8, 2]``: elements have ``itemsize`` 4, so parts are multiples of
    4 elements.
    """
    unit = max(1, _ALIGNMENT // itemsize)
    part_size = -(-n // (count * unit)) * unit
    return [max(0, min(part_size, n - k * part_size)) for k in range(count)]
