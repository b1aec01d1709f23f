"""Turn parts of unequal sizes into balanced shards, by sending rows between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from mirrored.transports.default import current

from ..movement.grad_mode import records
from ..movement.world import my_coordinate
from ..spec import NdSbp, Placement, Split, TensorSpec

Shapes = Mapping[int, tuple[int, ...]]


def joined_shape(name: str, placement: Placement, sbp: NdSbp, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which each rank has a part.

    Sizes of parts add up along dims that are split: parts [3, 10], [2, 10] under S(0) -> [5, 10].

    Args:
        name: the name of the argument, for errors.
        placement: the placement of the ranks.
        sbp: the layout of the whole tensor.
        shapes: rank -> the shape of its part.

    Raises:
        ValueError: the parts do not fit together.
    """
    first = shapes[placement.first_rank]
    whole_shape = list(first)
    for dim in range(len(first)):
        axes = [a for a, e in enumerate(sbp) if isinstance(e, Split) and e.dim == dim]
        for rank, shape in shapes.items():
            at = placement.coordinate_of(rank)
            assert at is not None
            reference_rank = placement.rank_at([c if a in axes else 0 for a, c in enumerate(at)])
            if shape[dim] != shapes[reference_rank][dim]:
                raise _misfit_error(
                    name, sbp, dim, {r: s for r, s in shapes.items() if r in (rank, reference_rank)}
                )
        if axes:
            whole_shape[dim] = sum(
                shapes[rank][dim] for rank in _ranks_along(placement, axes, None)
            )
    return tuple(whole_shape)


def balance_parts(name: str, x: torch.Tensor, spec: TensorSpec, shapes: Shapes) -> torch.Tensor:
    """Return this rank's shard of a tensor of which each rank passes a part of any size.

    The parts, joined in the order of the ranks' coordinates, are the whole; ranks send each other
    rows so that the shards are balanced: parts of 5 and 1 rows -> shards of 3 and 3.

    Args:
        name: the name of the argument, for errors.
        x: this rank's part.
        spec: the spec of the whole tensor.
        shapes: rank -> the shape of its part.

    Raises:
        ValueError: two dims are split unevenly, or the parts need a gradient.
    """
    placement, at = spec.placement, my_coordinate(spec.placement)
    dim = _only_dim(name, x, spec, shapes)
    axes = [a for a, entry in enumerate(spec.sbp) if isinstance(entry, Split)]
    ranks = _ranks_along(placement, axes, at)
    held = _ranges([shapes[rank][dim] for rank in ranks])
    regions = [spec.region(placement.coordinate_of(rank)) for rank in ranks]
    wanted = [(starts[dim], starts[dim] + sizes[dim]) for starts, sizes in regions]
    me = ranks.index(current().rank)
    sends = [
        (rank, x.narrow(dim, start - held[me][0], stop - start).contiguous())
        for rank, piece in zip(ranks, wanted)
        if (start := max(piece[0], held[me][0])) < (stop := min(piece[1], held[me][1]))
    ]
    receives = [
        (rank, (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype)
        for rank, part in zip(ranks, held)
        if (start := max(part[0], wanted[me][0])) < (stop := min(part[1], wanted[me][1]))
    ]
    received = current().exchange(sends, receives, tuple(ranks), x.device)
    return torch.cat(received, dim) if received else x.narrow(dim, 0, 0).clone()


def _only_dim(name: str, x: torch.Tensor, spec: TensorSpec, shapes: Shapes) -> int:
    """Return the only dim along which the tensor of unevenly sized parts is split.

    Raises:
        ValueError: two dims are split, or the parts need a gradient, which ``balance_parts`` does
            not support.
    """
    dims = {entry.dim for entry in spec.sbp if isinstance(entry, Split)}
    if len(dims) > 1 or records((x,)):
        why = "two dims are split" if len(dims) > 1 else "its gradient is asked for"
        raise ValueError(
            f"parallelize: the parts of {name} are uneven, {_shapes_text(shapes)}, and {why}. "
            "Pass parts of balanced sizes, as consistent.from_local takes them."
        )
    (dim,) = dims
    return dim


def _ranks_along(placement: Placement, axes: Sequence[int], at: Sequence[int] | None) -> list[int]:
    """Return the ranks whose coordinates equal ``at`` on all placement axes except ``axes``.

    They are in the order of their coordinates, outer axis first. None stands for coordinate 0 on
    every axis.
    """
    coordinate = list(at or (0,) * placement.ndim)
    ranks = []
    for steps in itertools.product(*(range(placement.shape[axis]) for axis in axes)):
        for axis, step in zip(axes, steps):
            coordinate[axis] = step
        ranks.append(placement.rank_at(coordinate))
    return ranks


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, stop) of consecutive parts: sizes 3, 2 -> ``[(0, 3), (3, 5)]``."""
    stops = list(itertools.accumulate(sizes))
    return [(stop - size, stop) for stop, size in zip(stops, sizes)]


def _misfit_error(name: str, sbp: NdSbp, dim: int, shapes: Shapes) -> ValueError:
    return ValueError(
        f"parallelize: the parts of {name} do not fit beside each other as {sbp}: dim {dim} has "
        f"other sizes, {_shapes_text(shapes)}. Pad to one size on all ranks, and pass what has "
        "no dim of the batch whole: inputs={'*': S(0), 'its name': B}."
    )


def _shapes_text(shapes: Shapes) -> str:
    return ", ".join(f"rank {rank} has {list(shape)}" for rank, shape in shapes.items())
