"""Conversion from the mirrored view to the global one, the reverse of ``to_mirrored``."""

from __future__ import annotations

from collections.abc import Sequence

from mirrored import mirrored_tensor
from mirrored.mirrored_tensor import MirroredTensor

from ..spec import Placement, S, SbpLike
from .global_tensor import GlobalTensor
from .making.create import from_local


def from_mirrored(
    x: MirroredTensor,
    sbp: SbpLike | None = None,
    placement: Placement | None = None,
    shape: Sequence[int] | None = None,
    check: bool = True,
) -> GlobalTensor:
    """Return the global tensor whose shards are the elements of the mirrored tensor ``x``.

    A mirrored tensor is a list with one element per device. This is ``x.to_global(...)``, the
    reverse of ``GlobalTensor.to_mirrored``.

    Args:
        x: the mirrored tensor; its element on each device becomes that device's shard.
        sbp: layout per axis of the placement, which says how the elements make up the whole;
            without it ``S(0)``, sharded along dim 0.
        placement: a grid of the ranks of ``x``; without it these ranks in one row.
        shape: the logical shape, as in ``from_local``.
        check: compare the elements between ranks, as in ``from_local``.

    Raises:
        ValueError: ``placement`` has other ranks than ``x``, or an element is not a shard of the
            layout.
    """
    if placement is None:
        kind = "cuda" if x.is_cuda else "cpu"
        placement = Placement(kind, list(x.ranks))
    elif placement.ranks.ravel().tolist() != list(x.ranks):
        raise ValueError(
            f"to_global: x has its elements on ranks {x.ranks}, and the target is {placement}.\n"
            "  Elements stay where they are.\n"
            "  Give a grid of these ranks, and move the result: to_global(placement=...)."
        )
    return from_local(
        x.to_local(), placement, S(0) if sbp is None else sbp, shape=shape, check=check
    )


mirrored_tensor.register_to_global(from_mirrored)
