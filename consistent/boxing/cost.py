"""Cost of the moves of a boxing plan: bytes sent and estimated seconds.

Bytes are exact: uneven pieces are sent as they are, without padding. Seconds are latency + bytes /
bandwidth, a model that only has to rank plans. Local copies are nearly free but not free, so that
of two plans that send the same bytes, the plan that touches less memory in fewer moves wins.

The built-in speeds alone decide which layouts an op gets and which moves lead to them. Layouts and
moves therefore follow from the program: they are the same on all ranks, at any time and on any
machine, and so are the bits of the results. ``movement/speeds.py`` has the measured speeds, and
says what they decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import NdSbp, Sbp, Split, items_in, overlapping, piece

LOCAL_KINDS = ("slice", "keep_first", "keep", "pad")


@dataclass(frozen=True, slots=True)
class Device:
    """Speeds of one device type and of its links, by which moves and ops are ranked."""

    latency: float  # seconds before the first byte of a collective arrives
    bandwidth: float  # bytes per second that a rank sends
    overhead: float  # seconds to start one local copy
    memory: float  # bytes per second of a local copy, and of what an op reads and writes
    python: float  # seconds that a communication keeps Python busy, on top of its own time
    flops: float  # operations per second of one rank in a product of matrices

    def move_seconds(self, nbytes: int, local_nbytes: int) -> float:
        """Return the estimated time of a move whose busiest rank sends ``nbytes``. Its largest
        result, ``local_nbytes``, is written to memory."""
        wire = self.latency + nbytes / self.bandwidth if nbytes else 0.0
        return wire + self.overhead + local_nbytes / self.memory


DEVICES = {
    # Orders of magnitude, which is all that ranking layouts and moves needs. Between two network
    # namespaces of an idle machine, sockets take 30 us for a small collective and reach 1.5 GB/s in
    # a large one; a core copies 10 GB/s and computes 50 GFLOP/s in matrix products. The Python time
    # of a message is that of 20 ops of 8 us, as machines/machine.py counts it.
    "cpu": Device(30e-6, 1.5e9, overhead=2e-6, memory=10e9, python=160e-6, flops=5e10),
    # NCCL within an NVLink node takes 10 to 20 us and reaches 100 GB/s and more; a kernel starts in
    # about 5 us; HBM moves 2 TB/s and more; flops is half the peak of a data-centre GPU in two-byte
    # floats. Python costs nothing here, because kernel launches run ahead of the GPU.
    "cuda": Device(15e-6, 100e9, overhead=5e-6, memory=2e12, python=0.0, flops=3e14),
}


def total_bytes(
    now: Sbp, entry: Sbp, axis: int, grid: Sequence[int], sbp: NdSbp, nbytes: int
) -> int:
    """Return the bytes that all ranks together send in the move of ``axis`` from ``now`` to
    ``entry``. Moves from S to S are not covered.

    ``sbp`` is the nd-sbp before the move, and ``nbytes`` are the bytes of the logical tensor, of
    which the ranks along the axis together hold one copy for each B or P along the other axes.
    """
    copies = math.prod(n for a, n in enumerate(grid) if a != axis and not sbp[a].is_split)
    if now.is_partial:
        return (1 if entry.is_split else 2) * (grid[axis] - 1) * copies * nbytes
    return (grid[axis] - 1) * copies * nbytes if now.is_split and entry.is_broadcast else 0


def whole_sizes(
    shape: Sequence[int], grid: Sequence[int], sbp: NdSbp, axis: int
) -> tuple[int, ...]:
    """Return the sizes of the part of a tensor that the ranks along ``axis`` hold together: those
    of the largest shard under ``sbp`` if ``axis`` did not split. The largest shard is at the grid's
    origin."""
    sizes = list(shape)
    for a, entry in enumerate(sbp):
        if a != axis and isinstance(entry, Split):
            sizes[entry.dim] = largest(entry, sizes[entry.dim], grid[a])
    return tuple(sizes)


def largest(entry: Split, n: int, parts: int) -> int:
    """Return how many of ``n`` items the rank with the most items holds."""
    if entry.cut is None:
        return piece(n, parts, 0)[1]
    return max(entry.size(n, parts, k) for k in range(parts))


def move_bytes(
    src: Sbp, dst: Sbp, whole: Sequence[int], parts: int, itemsize: int
) -> tuple[int, int]:
    """Return (bytes that the busiest rank sends, bytes of the largest result) of one move.

    Args:
        src: SBP of the axis before the move.
        dst: SBP of the axis after the move.
        whole: sizes of the part that the ranks of the axis hold together, see ``whole_sizes``.
        parts: number of ranks along the axis.
        itemsize: bytes of one element.
    """
    total = math.prod(whole) * itemsize
    if any(isinstance(entry, Split) and entry.cut is not None for entry in (src, dst)):
        return _cut_bytes(src, dst, whole, parts, total)
    result = _part(total, whole, dst.dim, parts, 0) if isinstance(dst, Split) else total
    if src.is_broadcast or (src.is_split and dst.is_partial):
        return 0, result
    if isinstance(src, Split):
        if isinstance(dst, Split):
            return _all_to_all_bytes(total, whole, (src.dim, dst.dim), parts), result
        return (parts - 1) * _part(total, whole, src.dim, parts, 0), result
    if isinstance(dst, Split):
        return total - _part(total, whole, dst.dim, parts, parts - 1), result
    # P -> B is an all-reduce: a ring sends 2 * (parts - 1) / parts of the data. Rounded up.
    return -(-2 * (parts - 1) * total // parts), result


def _cut_bytes(src: Sbp, dst: Sbp, whole: Sequence[int], parts: int, total: int) -> tuple[int, int]:
    """Return ``move_bytes`` for a move where ``src`` or ``dst`` is a custom cut."""
    if total == 0:
        return 0, 0
    if isinstance(src, Split) and isinstance(dst, Split):
        n, m = whole[src.dim], whole[dst.dim]
        result = total // m * largest(dst, m, parts)
        if src.dim == dst.dim:
            lacks = (src.size(n, parts, k) - _kept(src, dst, n, parts, k) for k in range(parts))
            return total // n * max(lacks), result
        sends = (src.size(n, parts, k) * (m - dst.size(m, parts, k)) for k in range(parts))
        return total // (n * m) * max(sends), result
    if isinstance(src, Split):
        sent = (parts - 1) * (total // whole[src.dim]) * largest(src, whole[src.dim], parts)
        return (sent if dst.is_broadcast else 0), total
    assert isinstance(dst, Split)
    n = whole[dst.dim]
    held = [total // n * dst.size(n, parts, k) for k in range(parts)]
    return (0 if src.is_broadcast else total - min(held)), max(held)


def _kept(src: Split, dst: Split, n: int, parts: int, k: int) -> int:
    """Return how many of ``n`` items rank ``k`` holds both before and after the move, and need not
    send."""
    return items_in(overlapping(src.runs(n, parts, k), dst.runs(n, parts, k)))


def _part(total: int, whole: Sequence[int], dim: int, parts: int, index: int) -> int:
    """Return how many of ``total`` bytes are in piece ``index`` of dim ``dim``, split into
    ``parts`` pieces."""
    n = whole[dim]
    return total // n * piece(n, parts, index)[1] if n else 0


def _all_to_all_bytes(total: int, whole: Sequence[int], dims: tuple[int, int], parts: int) -> int:
    i, j = (whole[dim] for dim in dims)
    if total == 0:
        return 0
    # Balanced piece sizes along i and j drop by one at ranks i % parts and j % parts, so rank 0 and
    # these two ranks cover every combination of sizes.
    return max(
        total // (i * j) * piece(i, parts, k)[1] * (j - piece(j, parts, k)[1])
        for k in (0, i % parts, j % parts)
    )
