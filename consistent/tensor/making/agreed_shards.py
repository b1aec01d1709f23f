"""The spec that the shards of all ranks fit, for ``from_local``: ranks exchange their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks

from ...movement import check_mode as checking
from ...movement.world import my_coordinate
from ...spec import B, Coordinate, NdSbp, Placement, Split, TensorSpec, resolve_dims


def agreed_spec(
    shard: torch.Tensor,
    placement: Placement,
    entries: NdSbp,
    shape: Sequence[int] | None,
    check: bool,
) -> TensorSpec | None:
    """Exchange the shapes and dtypes of shards between ranks, and return the spec they all fit.

    ``from_local`` calls it; every rank of the world takes part.

    Args:
        shard: this rank's shard; not read outside the placement.
        placement: the ranks that have a shard.
        entries: the SBP of each axis.
        shape: the logical shape, or None to compute it from the shards.
        check: whether to compare the values of ranks that should be replicas.

    Raises:
        ValueError: the ranks pass different layouts, or a shard does not fit.
    """
    is_inside = my_coordinate(placement) is not None
    note = (tuple(shard.shape), shard.dtype, entries, shape and tuple(shape)) if is_inside else None
    notes = gather_from_ranks(note)
    ranks = placement.ranks.ravel().tolist()
    _check_notes(notes, ranks)
    _, dtype, entries, shape = notes[ranks[0]]
    if shape is None:
        shape = _logical_shape(placement, entries, {rank: notes[rank][0] for rank in ranks})
    spec = TensorSpec.of(placement, entries, shape, dtype)
    for rank in ranks:
        coordinate = placement.coordinate_of(rank)
        if notes[rank][0] != spec.local_shape(coordinate):
            raise wrong_shard_error(spec, coordinate, rank, notes[rank][0])
    if check and is_inside:
        check_equal_along(
            "from_local", shard, placement, tuple(a for a, e in enumerate(spec.sbp) if e is B)
        )
    return spec


def _check_notes(notes: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raise if ``ranks`` passed different dtypes, numbers of dims, SBPs or logical shapes.

    ``notes`` has for each rank of the world (shape of its shard, dtype, SBPs, logical shape or
    None).
    """
    first = notes[ranks[0]]
    for rank in ranks[1:]:
        note = notes[rank]
        if note is None or note[1:] != first[1:] or len(note[0]) != len(first[0]):
            raise ValueError(
                "from_local: the ranks do not agree.\n"
                f"  rank {ranks[0]} gives {_text_of_note(first)}\n"
                f"  rank {rank} gives {_text_of_note(note)}\n"
                "  Give the same dtype, number of dims, sbp and shape on every rank of the "
                "placement."
            )


def _logical_shape(
    placement: Placement, entries: NdSbp, shapes: dict[int, tuple[int, ...]]
) -> list[int]:
    """Return the logical shape of a tensor, given the shapes of its shards by rank.

    The size of a split dim is the sum over the axes that split it, at coordinate 0 of all other
    axes: S(0) with shards (3, 4) and (2, 4) gives [5, 4].
    """
    shape = list(shapes[placement.first_rank])
    resolved = resolve_dims(entries, placement, shape)
    for dim in range(len(shape)):
        axes = [a for a, e in enumerate(resolved) if isinstance(e, Split) and e.dim == dim]
        if axes:
            shape[dim] = sum(
                size[dim]
                for rank, size in shapes.items()
                if all(
                    c == 0
                    for a, c in enumerate(placement.coordinate_of(rank) or ())
                    if a not in axes
                )
            )
    return shape


def _text_of_note(note: tuple | None) -> str:
    if note is None:
        return "nothing (it sees itself outside the placement)"
    size, dtype, entries, shape = note
    return f"{dtype} {size} as {entries}" + (f" of {shape}" if shape is not None else "")


def wrong_shard_error(
    spec: TensorSpec, at: Coordinate | None, rank: int, shape: tuple[int, ...]
) -> ValueError:
    """Return the error for a shard of shape ``shape`` that does not fit ``spec`` on ``rank``."""
    return ValueError(
        f"from_local: rank {rank} has a piece of shape {shape}, and of {spec} it holds "
        f"{spec.local_shape(at)}: "
        + (
            ""
            if spec.layout.is_cut
            else "pieces are balanced, the first ones one larger where the size does not divide."
        )
        + "\n"
        "  Give that piece, or the sbp and shape= that the pieces have. To cut a tensor that every "
        "rank has whole, "
        "use distribute(tensor, placement, sbp)."
    )


def check_equal_along(
    what: str, x: torch.Tensor, placement: Placement, axes: tuple[int, ...]
) -> None:
    """Raise on every rank if ``x`` differs between ranks that should be replicas along ``axes``.

    The ranks of the placement compare hashes. ``what`` names the op in the error.
    """
    ranks = tuple(placement.ranks.ravel().tolist())
    gathered_digests = gather_from_ranks(checking.digest(x), ranks)
    # Each rank compares all digests, not only its own, so that all raise the same error.
    digests = dict(zip(ranks, gathered_digests, strict=True))
    for rank, digest in digests.items():
        coordinate = placement.coordinate_of(rank)
        assert coordinate is not None
        replica = placement.rank_at([0 if axis in axes else c for axis, c in enumerate(coordinate)])
        if digests[replica] != digest:
            raise ValueError(
                f"{what}: ranks {replica} and {rank} must have the same values, and they differ:\n"
                f"  rank {replica} has {digests[replica]}\n  rank {rank} has {digest}\n"
                "  Make them equal (same seed, same data), or give the SBP of the pieces with "
                "from_local(piece, ...)."
            )
