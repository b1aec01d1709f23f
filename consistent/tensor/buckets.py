"""Summing the gradients of B leaves while backward goes on: large ones at once where ranks share
memory, the others in buckets whose all-reduces overlap with the rest of backward.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from mirrored import comm

from ..boxing.run import here
from ..spec import Placement
from .gradients import raw_grad, settled_spec
from .shards import HookOff, attach, plain

# Buckets go out as they fill. 25 MB is DistributedDataParallel's default; the first is small so
# that the wire starts working early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# Where ranks share memory a gradient of at least so many bytes is summed where it lies, at once:
# there is no wire to keep busy, and a bucket would copy it twice.
AT_ONCE_BYTES = 64 << 10


class _State(threading.local):
    """What one thread's backward has in flight."""

    def __init__(self) -> None:
        self.sync = True
        self.depth = 0
        self.reset()

    def reset(self) -> None:
        self.open: dict[tuple, list[Any]] = {}
        self.bytes: dict[tuple, int] = {}  # of those in `open`
        self.flying: list[_Bucket] = []
        self.launched = 0


state = _State()


class _Bucket:
    """Leaves whose gradients are being summed in one flat all-reduce over one set of axes."""

    __slots__ = ("leaves", "flat", "handles", "axes")

    def __init__(self, leaves: list[Any], axes: tuple[int, ...]):
        self.leaves, self.axes = leaves, axes
        grads = [raw_grad(leaf) for leaf in leaves]
        self.flat = torch.cat([plain(g).reshape(-1) for g in grads])
        placement = leaves[0]._spec.placement
        at = here(placement)
        self.handles: list[Any] = []
        if at is not None:
            # Axes after the first wait for the one before; one axis is the common case.
            ranks = placement.axis_ranks(axes[0], at)
            self.handles.append(comm.current().all_reduce_async(self.flat, ranks))

    def finish(self) -> None:
        placement = self.leaves[0]._spec.placement
        at = here(placement)
        flat = self.flat
        if at is not None:
            flat = self.handles[0].wait()
            for axis in self.axes[1:]:
                flat = comm.current().all_reduce(flat, placement.axis_ranks(axis, at))
        position = 0
        for leaf in self.leaves:
            grad = raw_grad(leaf)
            n = plain(grad).numel()
            with torch.no_grad(), HookOff():
                piece = flat[position : position + n].view(torch.Tensor.size(grad))
                torch.Tensor.copy_(grad, piece)
            position += n
            attach(grad, settled_spec(leaf._spec, grad.dtype))


def put(leaf: Any, grad: Any, axes: tuple[int, ...]) -> None:
    """Sum ``grad``, which lies in ``leaf``, over ``axes``: at once, or with others in a bucket."""
    local, placement = plain(grad), leaf._spec.placement
    if local.nbytes >= AT_ONCE_BYTES and _sum_at_once(local, placement, axes):
        attach(grad, settled_spec(leaf._spec, grad.dtype))
        return
    key = (placement, axes, grad.dtype)
    state.open.setdefault(key, []).append(leaf)
    state.bytes[key] = state.bytes.get(key, 0) + local.nbytes
    if state.bytes[key] >= (BUCKET_BYTES if state.launched else FIRST_BUCKET_BYTES):
        _launch(key)


def _sum_at_once(local: torch.Tensor, placement: Placement, axes: tuple[int, ...]) -> bool:
    """Sum ``local`` over ``axes`` in place, if the ranks share the host's memory."""
    at, transport = here(placement), comm.current()
    if at is None or placement.type != "cpu":
        return False
    groups = [placement.axis_ranks(axis, at) for axis in axes]
    if not all(transport.shares(ranks, "cpu") for ranks in groups):
        return False
    summed = local
    for ranks in groups:
        summed = transport.all_reduce_async(summed, ranks).wait()
    if summed.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(summed)
    return True


def _launch(key: tuple) -> None:
    leaves = state.open.pop(key, [])
    state.bytes.pop(key, None)
    if leaves:
        state.flying.append(_Bucket(leaves, key[1]))
        state.launched += 1


def settle(leaf: Any) -> None:
    """Finish the bucket that holds ``leaf``, if one does: the leaf gets a second gradient in one
    backward."""
    waiting = any(x is leaf for bucket in state.open.values() for x in bucket)
    if waiting or any(x is leaf for bucket in state.flying for x in bucket.leaves):
        flush()


def flush() -> None:
    """Finish all gradient reductions in flight."""
    for key in list(state.open):
        _launch(key)
    flying, state.flying, state.launched = state.flying, [], 0
    for bucket in flying:
        bucket.finish()
