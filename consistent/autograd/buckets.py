"""Summing the gradients of B leaves while backward goes on: large ones at once where ranks share
memory, the others in buckets whose all-reduces overlap with the rest of backward.

Which leaves fill a bucket is decided by their specs alone, so that all ranks of a sum agree
(``csrc/bindings/dispatch/gradients/waiting.h``).
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from mirrored.transports.default import current

from ..boxing.plan import plan as plan_boxing
from ..dispatch import _C
from ..dispatch.plans.gradients import summed_axes
from ..movement import check_mode
from ..movement.run import finishers
from ..movement.run import observers as boxing_observers
from ..movement.world import my_coordinate
from ..spec import Placement, TensorSpec
from .shown import forget_shown, hidden_again

# Buckets are sent as they fill. 25 MB is DistributedDataParallel's default; the first is small so
# that sending starts early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# Where ranks share memory a gradient of at least this many bytes is summed in place, at once: there
# is no link to keep busy, and a bucket would copy it twice.
AT_ONCE_BYTES = 64 << 10


class _State(threading.local):
    """The buckets that one thread's backward has in flight."""

    def __init__(self) -> None:
        self.flying: list[_Bucket] = []


_state = _State()
_numbers: dict[tuple, int] = {}


def number_of(placement: Placement, axes: tuple[int, ...], dtype: torch.dtype) -> int:
    """The number of the buckets whose leaves are summed over ``axes`` of ``placement``."""
    return _numbers.setdefault((placement, axes, dtype), len(_numbers))


def limits() -> tuple[int, int, int]:
    """Bytes of the first bucket and of later ones, and of gradients that are summed at once."""
    return FIRST_BUCKET_BYTES, BUCKET_BYTES, AT_ONCE_BYTES


def bytes_of(spec: TensorSpec) -> int:
    """Bytes of the largest shard: the size of a gradient of ``spec`` as every rank counts it."""
    return math.prod(spec.local_shape(None)) * spec.dtype.itemsize


class _Bucket:
    """Addends that are being summed in one flat all-reduce per axis."""

    __slots__ = ("positions", "handle", "rest")

    def __init__(self, positions: list[int], flat: torch.Tensor, groups: list[tuple[int, ...]]):
        # Axes after the first wait for the one before; one axis is the common case.
        self.positions, self.rest = positions, groups[1:]
        self.handle = current().all_reduce_async(flat, groups[0])

    def finish(self) -> None:
        flat = self.handle.wait()
        for ranks in self.rest:
            flat = current().all_reduce(flat, ranks)
        _C.accumulate(self.positions, flat)


def launch(positions: list[int], leaves: list[Any], flat: torch.Tensor) -> None:
    """Start to sum the addends that wait at ``positions``; ``flat`` has them side by side."""
    for leaf in leaves:
        _observe(leaf._spec)
    _state.flying.append(_Bucket(positions, flat, _groups(leaves[0]._spec)))


def finish() -> None:
    """Wait for all sums that are under way and add them to the leaves' gradients."""
    _C.launch_all()
    flying, _state.flying = _state.flying, []
    with hidden_again():
        for bucket in flying:
            bucket.finish()
        _C.clear_waiting()


def reset() -> None:
    """Forget what a backward that raised had in flight."""
    _C.clear_waiting()
    _state.flying = []
    forget_shown()


def sum_at_once(addend: torch.Tensor, spec: TensorSpec, unshared: bool) -> torch.Tensor | None:
    """The sum of a large gradient of a leaf with ``spec``, if its ranks share the host's memory;
    None otherwise.

    The sum is made in place where nobody else holds ``addend`` (``unshared``).
    """
    at, transport = my_coordinate(spec.placement), current()
    if at is None or bytes_of(spec) < AT_ONCE_BYTES or addend.layout is not torch.strided:
        return None
    groups = _groups(spec)
    if spec.placement.type != "cpu" or not all(transport.shares(g, "cpu") for g in groups):
        return None
    _observe(spec)
    summed = addend if unshared and addend.is_contiguous() else addend.clone()
    for ranks in groups:
        summed = transport.all_reduce_async(summed, ranks).wait()
    for finish in finishers:
        finish(spec.dual, spec.settled)
    return summed


def _groups(spec: TensorSpec) -> list[tuple[int, ...]]:
    """The ranks to sum over, for each axis in turn."""
    at = my_coordinate(spec.placement)
    assert at is not None
    return [spec.placement.axis_ranks(axis, at) for axis in summed_axes(spec)]


def _observe(spec: TensorSpec) -> None:
    if check_mode.enabled:
        check_mode.compare(spec.dual, spec.settled, "gradient")
    if boxing_observers:
        target = spec.settled
        moves = plan_boxing(spec.dual, target)
        for observe in boxing_observers:
            observe(spec.dual, target, moves)
