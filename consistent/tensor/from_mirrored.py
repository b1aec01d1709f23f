"""From the mirrored view to the global one. The way back is ``GlobalTensor.to_mirrored``."""

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
    """``MirroredTensor.to_global``: the element on each device is its piece of the result."""
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


mirrored_tensor.enter_to_global(from_mirrored)
