"""The types of create.py, which may not import the class whose objects it makes."""

from collections.abc import Sequence

import torch

from ...spec import Placement, SbpLike
from ..global_tensor import GlobalTensor

def from_local(
    shard: torch.Tensor,
    placement: Placement,
    sbp: SbpLike,
    *,
    shape: Sequence[int] | None = None,
    check: bool = False,
) -> GlobalTensor: ...
def distribute(
    tensor: torch.Tensor,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    check: bool = False,
) -> GlobalTensor: ...
def check_world(what: str, placement: Placement) -> None: ...
