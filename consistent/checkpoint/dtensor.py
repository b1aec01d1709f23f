"""Conversion of global tensors to DTensors and back, between SBP and DTensor's placements.

``S(d)`` (sharded) is ``Shard(d)``, ``B`` (replicated) is ``Replicate()``, ``P`` (partial sum) is
``Partial()``. The two libraries divide a dim that does not divide evenly in different ways, and
then some rows have to move between ranks:

```
10 rows on 4 ranks     S(0)      0-2 | 3-5 | 6-7 | 8-9        balanced
                       Shard(0)  0-2 | 3-5 | 6-8 | 9          torch.chunk: as many as fit at first
```
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mirrored.transports.default import current

from ..dispatch.plans.shards import is_global, plain
from ..dispatch.running.moved_views import refresh
from ..movement.world import device_of, my_coordinate
from ..spec import B, Coordinate, P, Placement, S, Split, TensorSpec
from ..spec.sbp import Sbp, partial_max, partial_min
from ..tensor.making.create import from_local

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts, sizes


def to_dtensor(x: Any, mesh: Any = None) -> Any:
    """Convert a global tensor to a DTensor on the same ranks.

    A collective of all ranks of the world.

    The DTensor shares the shard's memory where both libraries divide the tensor in the same way. It
    is detached: no gradient flows through the conversion.

    Args:
        x: a global tensor.
        mesh: a DeviceMesh of the placement's grid of ranks; without it a mesh is made, and reused
            for the same placement.

    Raises:
        ValueError: the mesh has other ranks, or the ranks of the placement do not ascend along each
            axis.
    """
    from torch.distributed.tensor import DTensor

    if not is_global(x):
        raise TypeError(f"to_dtensor: x is a {type(x).__name__}, and not a global tensor.")
    x = x.detach().to_global(sbp=x._spec.plain.sbp) if x._spec.layout.is_cut else x
    spec: TensorSpec = x._spec
    mesh = _mesh_of(spec.placement) if mesh is None else mesh
    if mesh.mesh.tolist() != spec.placement.ranks.tolist():
        raise ValueError(
            f"to_dtensor: x is on {spec.placement}, and the mesh has ranks {mesh.mesh.tolist()}. "
            "Give a mesh of the same grid, or move x: x.to_global(placement=...)."
        )
    _check_order("to_dtensor", spec.placement)
    coordinate = my_coordinate(spec.placement)
    local = torch.empty(0, dtype=spec.dtype, device=device_of(spec.placement))
    if coordinate is not None:
        local = _redivide(
            plain(refresh(x)).detach(), spec, coordinate, spec.region, lambda c: _chunk_box(spec, c)
        )
    # DTensor keeps the stride of the logical tensor, here of a contiguous one.
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [_dtensor_placement(e) for e in spec.sbp],
        run_check=False, shape=spec.shape, stride=stride,
    )  # fmt: skip


def from_dtensor(x: Any) -> Any:
    """Convert a DTensor to a global tensor on the same ranks.

    A collective of all ranks of the world.

    The result shares the local tensor's memory where both libraries divide the tensor in the same
    way. It is detached: no gradient flows through the conversion.

    Args:
        x: a DTensor on a mesh of CPUs or of GPUs.

    Raises:
        ValueError: ``x`` is partial with a reduction that global tensors do not have, or the ranks
            of its mesh do not ascend along each axis.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise TypeError(f"from_dtensor: x is a {type(x).__name__}, and not a DTensor.")
    mesh = x.device_mesh
    placement = Placement(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)
    _check_order("from_dtensor", placement)
    x, final_sbp = _with_convertible_placements(x.detach())
    spec = TensorSpec.of(placement, [_sbp_of(p) for p in x.placements], x.shape, x.dtype)
    coordinate = my_coordinate(placement)
    local = torch.empty(0, dtype=spec.dtype)
    if coordinate is not None:
        local = x.to_local()
        # An AsyncCollectiveTensor: the collective that makes it may still run.
        local = local.wait() if hasattr(local, "wait") else local
        local = _redivide(local, spec, coordinate, lambda c: _chunk_box(spec, c), spec.region)
    result = from_local(local, placement, spec.sbp, shape=spec.shape)
    return result if final_sbp is None else result.to_global(sbp=final_sbp)


def _check_order(what: str, placement: Placement) -> None:
    """Raise ValueError unless the ranks of ``placement`` ascend along each axis.

    On other meshes DTensor contradicts itself: it takes the k-th piece from the rank with the k-th
    lowest number, but reports that the rank at place k of the mesh holds this piece.
    """
    ranks = placement.ranks
    if any((np.diff(ranks, axis=axis) < 0).any() for axis in range(ranks.ndim)):
        raise ValueError(
            f"{what}: the ranks of {placement} do not ascend along each axis, and DTensor mixes up "
            "the pieces of such a mesh. Use one whose ranks ascend: x.to_global(placement=...)."
        )


# Cached, because a new DeviceMesh may create process groups.
@lru_cache(maxsize=64)
def _mesh_of(placement: Placement) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(placement.type, placement.ranks.tolist(), mesh_dim_names=placement.axes)


def _dtensor_placement(entry: Sbp) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(entry, Split):
        return Shard(entry.dim)
    return Replicate() if entry is B else Partial(entry.op)  # type: ignore[attr-defined]


def _sbp_of(placement: Any) -> Sbp:
    if placement.is_shard():
        return S(placement.dim)
    if placement.is_replicate():
        return B
    sbp = {"sum": P, "max": partial_max, "min": partial_min}.get(placement.reduce_op)
    if sbp is None:
        raise ValueError(
            f"from_dtensor: x is {placement}, and a global tensor is partial as a sum, max or min. "
            "Reduce it first: x.redistribute(placements=[Replicate()])."
        )
    return sbp


def _with_convertible_placements(x: Any) -> tuple[Any, tuple[Sbp, ...] | None]:
    """Prepare a DTensor for conversion, if some of its placements correspond to no SBP.

    Such placements appear where FSDP of a tensor-parallel module divides a dim in another order
    than that of the mesh axes. Returns (DTensor, SBP): the axes that divide such dims are
    replicated in the DTensor, and the SBP is the layout to give the global tensor after the
    conversion. If all placements correspond to an SBP, the result is (x, None).
    """
    from torch.distributed.tensor import Replicate, Shard

    odd = [p.is_shard() and type(p) is not Shard for p in x.placements]
    odd = [o or (not p.is_shard() and not p.is_replicate() and not p.is_partial())
           for o, p in zip(odd, x.placements, strict=True)]  # fmt: skip
    if not any(odd):
        return x, None
    dims = {p.dim for o, p in zip(odd, x.placements, strict=True) if o}
    to_replicate = [
        o or getattr(p, "dim", None) in dims for o, p in zip(odd, x.placements, strict=True)
    ]
    final_sbp = tuple(
        S(p.dim) if c else _sbp_of(p) for c, p in zip(to_replicate, x.placements, strict=True)
    )
    placements = [Replicate() if c else p for c, p in zip(to_replicate, x.placements, strict=True)]
    return x.redistribute(x.device_mesh, placements), final_sbp


def _chunk_box(spec: TensorSpec, coordinate: Coordinate | None) -> Box:
    """Return the box (starts, sizes) of the rank at ``coordinate`` in a DTensor of layout ``spec``.

    DTensor divides like ``torch.chunk``: 10 rows on 4 ranks in 3, 3, 3 and 1.
    """
    assert coordinate is not None
    starts, sizes = [0] * spec.ndim, list(spec.shape)
    for axis, entry in enumerate(spec.sbp):
        if isinstance(entry, Split):
            n, size = sizes[entry.dim], -(-sizes[entry.dim] // spec.placement.shape[axis])
            start = min(coordinate[axis] * size, n)
            starts[entry.dim] += start
            sizes[entry.dim] = min(size, n - start)
    return tuple(starts), tuple(sizes)


def _redivide(
    local: torch.Tensor, spec: TensorSpec, coordinate: Coordinate, box_before: Any, box_after: Any
) -> Any:
    """Convert a rank's part of a tensor from one division among ranks to another.

    Args:
        local: this rank's part in the present division.
        spec: the layout; both divisions divide the tensor among the ranks of its split axes.
        coordinate: this rank's coordinate in the placement.
        box_before: maps a coordinate to the box that the rank has in the present division.
        box_after: maps a coordinate to the box that it has in the new division.

    Returns:
        This rank's part in the new division. It is ``local`` if the divisions are equal.
    """
    group = _split_group(spec, coordinate)
    boxes = [(box_before(c), box_after(c)) for c in group]
    # All ranks of the group compare the same boxes, so either all send or none.
    if all(a == b for a, b in boxes):
        return local
    ranks = tuple(spec.placement.rank_at(c) for c in group)
    own_box, new_box = box_before(coordinate), box_after(coordinate)
    to_send = [(r, _overlap(own_box, b)) for r, (_, b) in zip(ranks, boxes, strict=True)]
    sends = [(r, _slice(local, own_box, box)) for r, box in to_send if box]
    to_receive = [(r, _overlap(a, new_box)) for r, (a, _) in zip(ranks, boxes, strict=True)]
    to_receive = [(r, box) for r, box in to_receive if box]
    receives = [(r, box[1], spec.dtype) for r, box in to_receive]
    received = current().exchange(sends, receives, ranks, local.device)
    out = local.new_empty(new_box[1])
    for (_, box), piece in zip(to_receive, received, strict=True):
        _slice(out, new_box, box).copy_(piece)
    return out


def _split_group(spec: TensorSpec, coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates of the ranks that differ from ``coordinate`` along split axes only.

    On a 2x2 grid with ``(S(0), B)`` and ``coordinate = (0, 1)`` they are (0, 1) and (1, 1).
    Together these ranks hold the whole tensor once.
    """
    shape = spec.placement.shape
    coordinates: list[tuple[int, ...]] = [()]
    for axis, entry in enumerate(spec.sbp):
        steps: Sequence[int] = (
            range(shape[axis]) if isinstance(entry, Split) else [coordinate[axis]]
        )
        coordinates = [(*c, step) for c in coordinates for step in steps]
    return coordinates


def _overlap(a: Box, b: Box) -> Any:
    """Return the intersection of two boxes; None if it is empty."""
    starts = tuple(map(max, a[0], b[0]))
    ends = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    sizes = tuple(e - s for s, e in zip(starts, ends, strict=True))
    return (starts, sizes) if min(sizes, default=1) > 0 else None


def _slice(x: torch.Tensor, x_box: Box, box: Box) -> torch.Tensor:
    """Return a view of the elements of the box ``box``, which is inside the box ``x_box``.

    Both are boxes of the logical tensor, and ``x`` holds the elements of ``x_box``.
    """
    for d, (start, size) in enumerate(zip(*box, strict=True)):
        x = x.narrow(d, start - x_box[0][d], size)
    return x
