"""This rank's coordinate in a placement, and the placement of the whole world."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from mirrored.transports.default import current
from mirrored.transports.torch_dist.children import started_by_launcher

from ..spec import Coordinate, Layout, Placement, TensorSpec, World
from ..spec.tracer import Tracer


def my_coordinate(placement: Placement) -> Coordinate | None:
    """Return this rank's coordinate in the grid of ``placement``, or None if it is outside."""
    # Cached on the placement, by rank because simulated ranks share the object.
    coordinates = placement.__dict__.setdefault("_coordinates", {})
    rank = current().rank_in(placement)
    try:
        return coordinates[rank]
    except KeyError:
        coordinate = coordinates[rank] = placement.coordinate_of(rank)
        return coordinate


_CPU = torch.device("cpu")


def device_of(placement: Placement) -> torch.device:
    """Return the device on which this rank keeps its shards of tensors on ``placement``."""
    return _CPU if placement.type == "cpu" else current().device(placement.type)


def local_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of this rank's shard of ``spec``."""
    return spec.local_shape(my_coordinate(spec.placement))


class _ThreadState(threading.local):
    excludes_others: bool = False


_thread = _ThreadState()


@contextmanager
def excluding_others(applies: bool = True) -> Iterator[None]:
    """Declare, inside the context, that ranks outside the current placement do not run this code.

    Normally every rank runs the whole program, and ranks outside a placement take part in reading
    values. Inside the context they do not: only the ranks of the placement communicate, and the
    others are sent the outcome later. With ``applies=False`` the context changes nothing.
    """
    before, _thread.excludes_others = _thread.excludes_others, _thread.excludes_others or applies
    try:
        yield
    finally:
        _thread.excludes_others = before


def excludes_others() -> bool:
    """Return whether this thread is inside ``excluding_others``: others run no such code."""
    return _thread.excludes_others


def whole_on_world(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the same tensor, replicated (B) on all ranks of the world.

    It is the target when values are read on every rank. Inside ``excluding_others`` only the
    ranks of its own placement take part, so there it is B on that placement.
    """
    placement, size = spec.placement, current().size
    if placement.size != size and not excludes_others():
        placement = _world_placement(placement.type, size)
    return TensorSpec.laid(Layout.whole(placement), spec.shape, spec.dtype)


@lru_cache
def _world_placement(device_type: str, size: int) -> Placement:
    return Placement(device_type, range(size))


class _LaunchedWorld(World):
    """The world, whose size is known from the launcher before ``torch.distributed`` is initialized.

    A placement may be made before the first message, which initializes ``torch.distributed``.
    """

    def size(self) -> int | None:
        known_size = super().size()
        return (
            int(os.environ["WORLD_SIZE"])
            if known_size is None and started_by_launcher()
            else known_size
        )


Tracer(world=_LaunchedWorld).install()
