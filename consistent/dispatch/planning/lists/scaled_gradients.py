"""GradScaler's check and unscaling (``torch._amp_foreach_non_finite_check_and_unscale_``).

A gradient is finite if all of its shards are. Every rank must come to the same answer, or some
ranks would step and others would skip the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrored.transports.default import current

from ....movement.world import my_coordinate
from ....spec import B, TensorSpec
from ...plans.shards import is_global, plain, rebox, whole_on_all_ranks


@torch.no_grad()
def unscale(grads: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place; set ``found_inf`` to 1 if any is not finite.

    This is what ``torch.amp.GradScaler`` calls before the optimizer's step. All ranks find the same
    ``found_inf``, and so all skip the step or none.
    """
    factor, previous_flag = whole_on_all_ranks(inv_scale), whole_on_all_ranks(found_inf)
    flag = torch.zeros_like(previous_flag)
    # Communicates, so on every rank in the same order.
    tensors = [_tensor_to_check(g) for g in grads]
    held_tensors = [x for x in tensors if x is not None and x.device.type != "meta"]
    if held_tensors:
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            held_tensors, flag, factor
        )
    # The op has unscaled the sum of a P gradient, which is temporary; unscale its addends.
    for g in grads:
        if _is_partial(g) and my_coordinate(g.placement) is not None:
            plain(g).mul_(factor)
    # Decided by specs alone, never by values, so that all ranks take part in the reduction or none.
    if not all(_is_known_to_all(g) for g in grads):
        transport = current()
        flag = transport.all_reduce(flag, tuple(range(transport.size)), "max")
    found_inf.copy_(torch.where(flag.to(previous_flag.device) > 0, 1.0, previous_flag))


def _is_partial(g: Any) -> bool:
    return is_global(g) and any(entry.is_partial for entry in g.sbp)


def _tensor_to_check(g: Any) -> torch.Tensor | None:
    """Return the tensor that this rank checks for infinities and unscales for the gradient ``g``.

    It is the shard. For a P gradient it is a temporary sum over ranks, because the addends may be
    finite though their sum is not.
    """
    if not is_global(g):
        return g
    if _is_partial(g):
        spec: TensorSpec = g._spec
        return plain(rebox(g, spec.settled, "unscale"))
    return plain(g)


def _is_known_to_all(g: Any) -> bool:
    """Return whether each rank of the world checks the whole of ``g``, so that all find the same.

    If this holds for all gradients, ``found_inf`` need not be reduced over ranks.
    """
    if not is_global(g):
        return True
    return g.placement.size == current().size and all(entry is B for entry in g.sbp)
