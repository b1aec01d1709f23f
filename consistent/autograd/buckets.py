"""Sums of the gradients of B (replicated) leaves over ranks, done while backward goes on.

A bucket is a group of gradients that are concatenated and summed in one all-reduce, which overlaps
with the rest of backward. Where ranks share memory, large gradients are summed at once instead. The
leaves of a bucket are chosen by their specs alone, so that all ranks of a sum choose the same
(``csrc/bindings/dispatch/gradients/waiting.h``).
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from mirrored.transports.default import current
from mirrored.transports.torch_dist import groups

from ..boxing.plan import plan as plan_boxing
from ..dispatch import _C
from ..dispatch.plans.gradients import summed_axes
from ..dispatch.plans.shards import plain
from ..movement import check_mode
from ..movement.coded import start_sums
from ..movement.coders import Coder
from ..movement.run import notify_end
from ..movement.speeds import start_bytes
from ..movement.world import my_coordinate
from ..spec import Coordinate, Placement, TensorSpec
from ..spec.tracer import callbacks
from .coded_sums import axis_of, coded_moves, coder_of
from .shown import all_hidden, forget_all_records

_ON_BOXING_BEGIN = callbacks("on_boxing_begin")

# Buckets are sent as they fill. The largest has 25 MB, DistributedDataParallel's default; the first
# is small so that sending starts early. The size in between minimizes a cost in bytes: with G bytes
# of gradients in k buckets, each bucket has a start-up cost, in which the link could send s bytes,
# and the last bucket, of G / k bytes, travels when backward has ended. The sum k s + G / k is least
# for k near sqrt(G / s).
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LEAST_BUCKET_BYTES = 256 << 10
# On the CPU a gradient of at least this many bytes goes in no bucket: copying it in and out would
# take longer than another message (0.7 ms on two cores that also compute).
ALONE_BYTES = 4 << 20
# Bytes that fill a bucket of gradients that are scattered. It is small because they are as large as
# the gathered parameters, which ranks hold only for a short time.
SCATTERED_BUCKET_BYTES = 4 << 20
# Bytes that fill a bucket where ranks share memory: there is no link to keep busy, and at each sum
# a rank waits for others. There a gradient of at least SHARED_ALONE_BYTES is summed at once and in
# place, since a bucket would copy it twice.
SHARED_BUCKET_BYTES = 4 << 20
SHARED_ALONE_BYTES = 1 << 20


class InFlight(Protocol):
    """A group of gradients whose sums over ranks were started and not yet waited for.

    ``finish`` of this module calls ``turn`` of all such groups, then ``finish`` of each.
    """

    def turn(self) -> None:
        """Send the second message, for sums that take two; otherwise do nothing."""

    def finish(self) -> None:
        """Wait for the all-reduces under way, and add the sums to the leaves' gradients."""


class _Key(NamedTuple):
    """What the gradients of a bucket have in common, so that one message can sum them."""

    placement: Placement
    axes: tuple[int, ...]
    dtype: torch.dtype
    is_scattered: bool


class _State(threading.local):
    """The sums that this thread's backward pass has in flight, and the bytes of its buckets.

    The bytes in the last backward pass determine the sizes of buckets in the next one.
    """

    def __init__(self) -> None:
        self.in_flight: list[InFlight] = []
        # Bytes launched in this backward pass and in the last one, by number of the buckets.
        self.launched_nbytes: dict[int, int] = {}
        self.last_nbytes: dict[int, int] = {}


_state = _State()
_numbers: dict[_Key, int] = {}


def number_of(
    placement: Placement, axes: tuple[int, ...], dtype: torch.dtype, is_scattered: bool = False
) -> int:
    """Return the number by which the C++ code knows the bucket of gradients of this kind.

    Gradients of one kind are concatenated and summed in one message.

    Args:
        placement: the placement of the leaves.
        axes: the axes along which the gradients are summed.
        dtype: the dtype of the gradients.
        is_scattered: whether each rank gets its share of the sum (reduce-scatter) and not all of
            it.
    """
    return _numbers.setdefault(_Key(placement, axes, dtype, is_scattered), len(_numbers))


def forget_sizes() -> None:
    """Forget how many bytes of gradients the last backward had, by which buckets are sized.

    It is called for a new process group. Some of its ranks may have had another last backward than
    others, or none, so ranks would choose different sizes.
    """
    _state.last_nbytes.clear()


groups.new_group_callbacks.append(forget_sizes)


def least_alone_bytes() -> int:
    """Return the number of bytes from which a gradient may be summed alone, without a bucket.

    C++ passes gradients of at least this size to ``leaves.take_gradient``, which decides.
    """
    return min(SHARED_ALONE_BYTES, ALONE_BYTES)


def bucket_limit(number: int, launched: bool) -> int:
    """Return how many bytes of gradients fill the next bucket, so that it is sent.

    All ranks of the sum find the same: it follows from the gradients of the last backward, and from
    the cost of messages that all ranks assume.

    Args:
        number: the number of the kind of bucket, from ``number_of``.
        launched: whether a bucket of this kind was sent in this backward pass already; the first
            one is small, so that sending starts early.
    """
    # The dict keeps the order of insertion, which is that of the numbers.
    placement, axes, _, is_scattered = list(_numbers)[number]
    if not is_scattered and _share_memory(placement, axes):
        return SHARED_BUCKET_BYTES
    most = SCATTERED_BUCKET_BYTES if is_scattered else BUCKET_BYTES
    most = most if launched else FIRST_BUCKET_BYTES
    total = _state.last_nbytes.get(number)
    if total is None:
        return most
    count = max(1, round(math.sqrt(total / max(1, start_bytes(placement.type)))))
    return min(most, max(LEAST_BUCKET_BYTES, -(-total // count)))


def goes_alone(spec: TensorSpec) -> bool:
    """Return whether the gradient of a leaf with ``spec`` is too large for a bucket (CPU only)."""
    return spec.placement.type == "cpu" and spec.largest_nbytes >= ALONE_BYTES


class _Bucket:
    """Gradients that are being summed together: concatenated, by one all-reduce for each axis.

    ``positions`` are the indices of the addends in the C++ code's list of waiting addends.
    """

    __slots__ = ("positions", "handle", "rest")

    def __init__(self, positions: list[int], flat: torch.Tensor, groups: list[tuple[int, ...]]):
        # Only the first axis is summed asynchronously; each other axis needs the sum of the one
        # before, and mostly there is one axis.
        self.positions, self.rest = positions, groups[1:]
        self.handle = current().all_reduce_async(flat, groups[0])

    def turn(self) -> None:
        """Do nothing: this sum takes one message."""

    def finish(self) -> None:
        """Wait for the all-reduces under way, and add the sums to the leaves' gradients."""
        self.add(self.handle.wait())

    def add(self, flat: torch.Tensor) -> None:
        """Sum ``flat`` along all axes but the first, and add the sums to the leaves' gradients."""
        for ranks in self.rest:
            flat = current().all_reduce(flat, ranks)
        _C.accumulate(self.positions, flat)


class _CodedBucket(_Bucket):
    """Gradients that are being summed together, compressed along the axis of ``groups[0]``."""

    __slots__ = ("sums",)

    def __init__(
        self,
        positions: list[int],
        addends: list[torch.Tensor],
        coders: list[Coder],
        groups: list[tuple[int, ...]],
    ):
        self.positions, self.rest = positions, groups[1:]
        self.sums = start_sums(addends, coders, groups[0])

    def turn(self) -> None:
        self.sums.send_second()

    def finish(self) -> None:
        flat_sums = [x.view(-1) for x in self.sums.wait()]
        self.add(flat_sums[0] if len(flat_sums) == 1 else torch.cat(flat_sums))


def count_launched(number: int, nbytes: int) -> None:
    """Record that a bucket of ``nbytes`` was sent; the total sizes the next backward's buckets.

    All ranks must pass the same ``nbytes``. ``number`` is that of the kind of bucket.
    """
    _state.launched_nbytes[number] = _state.launched_nbytes.get(number, 0) + nbytes


def register_in_flight(sums: InFlight) -> None:
    """Register sums that were started, so that ``finish`` waits for them when backward ends."""
    _state.in_flight.append(sums)


def launch_bucket(positions: list[int], leaves: list[Any], flat: torch.Tensor) -> None:
    """Start the all-reduce of one bucket; C++ calls it when it is full, or when backward ends.

    Args:
        positions: indices of the bucket's addends in the C++ code's list of waiting addends.
        leaves: the leaf of each addend.
        flat: the concatenation of the addends.
    """
    spec: TensorSpec = leaves[0]._spec
    _notify_boxings(leaves)
    number = number_of(spec.placement, summed_axes(spec), spec.dtype)
    count_launched(number, sum(leaf._spec.largest_nbytes for leaf in leaves))
    if not any(map(coder_of, leaves)):
        register_in_flight(_Bucket(positions, flat, _groups(spec)))
        return
    # One bucket for each axis along which codecs sum, and one (None) for leaves without a codec.
    by_axis: dict[int | None, list[tuple[int, Any, torch.Tensor]]] = {}
    parts = flat.split([plain(leaf).numel() for leaf in leaves])
    for entry in zip(positions, leaves, parts, strict=True):
        axis = None if coder_of(entry[1]) is None else axis_of(entry[1])
        by_axis.setdefault(axis, []).append(entry)
    for axis, members in by_axis.items():
        member_positions = [position for position, _, _ in members]
        if axis is None:
            flat_rest = torch.cat([part for _, _, part in members])
            register_in_flight(_Bucket(member_positions, flat_rest, _groups(spec)))
            continue
        coders: Any = [coder_of(leaf) for _, leaf, _ in members]
        addends = [part.view(plain(leaf).shape) for _, leaf, part in members]
        other_axes = [a for a in summed_axes(spec) if a != axis]
        groups = _groups_along(spec.placement, (axis, *other_axes))
        register_in_flight(_CodedBucket(member_positions, addends, coders, groups))


def finish() -> None:
    """End the sums of a backward pass: send the buckets that are left, wait, and add to ``.grad``.

    C++ calls this when backward has computed all gradients.
    """
    _C.launch_all()
    in_flight, _state.in_flight = _state.in_flight, []
    with all_hidden():
        # All second messages are sent before any is waited for, so that they travel together.
        for bucket in in_flight:
            bucket.turn()
        for bucket in in_flight:
            bucket.finish()
        _C.clear_waiting()
    _state.last_nbytes |= _state.launched_nbytes
    _state.launched_nbytes = {}


def reset() -> None:
    """Drop all buckets and sums in flight; called after a backward pass that raised."""
    _C.clear_waiting()
    _state.in_flight, _state.launched_nbytes = [], {}
    forget_all_records()


def sum_at_once(leaf: Any, addend: torch.Tensor, unshared: bool) -> torch.Tensor | None:
    """Sum a large gradient at once over ranks that share memory; return the sum, or None.

    Where ranks share memory a bucket would only copy the gradient. None means that it has to go in
    a bucket: it is small or sparse, this rank is outside the placement, the ranks are on different
    hosts or on GPUs, or a codec compresses it.

    Args:
        leaf: the leaf.
        addend: this rank's addend of its gradient.
        unshared: whether nothing else refers to ``addend``; then the sum is made in its memory.
    """
    spec: TensorSpec = leaf._spec
    is_small = spec.largest_nbytes < SHARED_ALONE_BYTES or addend.layout is not torch.strided
    if is_small or my_coordinate(spec.placement) is None or coder_of(leaf) is not None:
        return None
    if not _share_memory(spec.placement, summed_axes(spec)):
        return None
    _notify_boxings([leaf])
    total = addend if unshared and addend.is_contiguous() else addend.clone()
    for ranks in _groups(spec):
        total = current().all_reduce_async(total, ranks).wait()
    notify_end((spec.dual, spec.settled))
    return total


def _share_memory(placement: Placement, axes: tuple[int, ...]) -> bool:
    """Return whether the ranks along each of ``axes`` share the memory of one host."""
    if placement.type != "cpu":
        return False
    return all(current().shares(ranks, "cpu") for ranks in _groups_along(placement, axes))


def _groups(spec: TensorSpec) -> list[tuple[int, ...]]:
    """Return the ranks with which this rank sums a gradient, a group for each summed axis."""
    return _groups_along(spec.placement, summed_axes(spec))


def _groups_along(placement: Placement, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return for each of ``axes`` the ranks along it that share this rank's other coordinates."""
    coordinate = my_coordinate(placement)
    assert coordinate is not None
    return _cached_groups(placement, axes, coordinate)


@lru_cache(1 << 8)
def _cached_groups(
    placement: Placement, axes: tuple[int, ...], coordinate: Coordinate
) -> list[tuple[int, ...]]:
    return [placement.axis_ranks(axis, coordinate) for axis in axes]


def _notify_boxings(leaves: list[Any]) -> None:
    """Notify check mode and tracers (observers of the program) before gradients are boxed.

    They are the gradients of ``leaves``, whose sums over ranks are about to start.
    """
    if check_mode.enabled or _ON_BOXING_BEGIN:
        for leaf in leaves:
            _notify_boxing(leaf)


def _notify_boxing(leaf: Any) -> None:
    spec: TensorSpec = leaf._spec
    if check_mode.enabled:
        check_mode.check_route(spec.dual, spec.settled, "gradient")
    if _ON_BOXING_BEGIN:
        target = spec.settled
        moves = coded_moves(leaf, plan_boxing(spec.dual, target))
        for notify in _ON_BOXING_BEGIN:
            notify(spec.dual, target, moves)
