"""This rank's place: its coordinate in a placement, the placement of all ranks of the world, and
what messages between them cost."""

from __future__ import annotations

from functools import lru_cache

from mirrored.transports.default import current

from ..boxing.cost import use_links
from ..spec import B, Coordinate, Placement, TensorSpec


def my_coordinate(placement: Placement) -> Coordinate | None:
    """This rank's coordinate in ``placement``; None outside it."""
    # Kept on the placement by rank: simulated ranks share it.
    known = placement.__dict__.setdefault("_coordinates", {})
    rank = current().rank
    try:
        return known[rank]
    except KeyError:
        made = known[rank] = placement.coordinate_of(rank)
        return made


def local_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Shape of this rank's shard of ``spec``."""
    return spec.local_shape(my_coordinate(spec.placement))


def whole_on_world(spec: TensorSpec) -> TensorSpec:
    """The spec of the same tensor with B on all ranks of the world."""
    placement, size = spec.placement, current().size
    if placement.size != size:
        placement = _world(placement.type, size)
    return TensorSpec.of(placement, (B,) * placement.ndim, spec.shape, spec.dtype)


@lru_cache
def _world(device_type: str, size: int) -> Placement:
    return Placement(device_type, range(size))


def _link(device_type: str) -> tuple[float, float] | None:
    found = current().link(device_type)
    return None if found is None else (found.latency_s, found.bytes_per_s)


use_links(_link)
