"""Entry of plain tensors into the stages of a recorded program: they become global tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.shards import attach
from ..movement import plain_values
from ..movement.differentiable import shard_of_plain
from ..movement.world import device_of, my_coordinate
from ..spec import TensorSpec


def entered(x: torch.Tensor, spec: TensorSpec, made_by: str = "") -> Any:
    """Return the plain tensor ``x`` as a global one with ``spec``: each rank keeps its part of it.

    Programs run it where a plain tensor enters a stage. If a module made the tensor (``made_by`` is
    its name), ranks first compare that they have the same.

    Raises:
        RuntimeError: the ranks' tensors differ, or have another shape than when recorded.
    """
    if my_coordinate(spec.placement) is not None:
        if made_by:
            _check_module_result(x, spec, made_by)
        if x.device.type != spec.placement.type:
            x = x.to(device_of(spec.placement))
    return attach(shard_of_plain(x, spec), spec)


def _check_module_result(x: torch.Tensor, spec: TensorSpec, made_by: str) -> None:
    """Raise if ``x``, which a module made, is not as recorded, or differs between ranks."""
    if x.shape != spec.shape or x.dtype != spec.dtype:
        raise RuntimeError(
            f"{made_by}: it returns a plain tensor, {x.dtype}{list(x.shape)}, and one of "
            f"{spec.dtype}{list(spec.shape)} when it was recorded.\n"
            "  What a stage's module returns has the shape that follows from its inputs' shapes.\n"
            "  Return a global tensor: from_local(x, placement, S(0)) if each rank has a part."
        )
    plain_values.compare_plain(made_by, [x], spec.placement, (made_by, x.dtype, x.ndim))
