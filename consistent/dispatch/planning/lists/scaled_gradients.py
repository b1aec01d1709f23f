"""``torch._amp_foreach_non_finite_check_and_unscale_``: what GradScaler does before a step.

A gradient is finite if all of its pieces are, and every rank must find the same, or some would step
and others would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrored.transports.default import current

from ....movement.boxed import box
from ....movement.world import my_coordinate, whole_on_world
from ....spec import B, TensorSpec
from ...plans.shards import is_global, plain, rebox


@torch.no_grad()
def unscale(grads: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Multiply ``grads`` with ``inv_scale`` in place; ``found_inf`` becomes 1 on every rank if any
    was not finite before."""
    factor, before = _value(inv_scale), _value(found_inf)
    found = torch.zeros_like(before)
    checked = [_checked(g) for g in grads]  # in order: this may communicate
    held = [x for x in checked if x is not None and x.device.type != "meta"]
    if held:
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            held, found, factor
        )
    for g in grads:
        if _is_partial(g) and my_coordinate(g.placement) is not None:
            plain(g).mul_(factor)
    if not all(_is_known_to_all(g) for g in grads):
        transport = current()
        found = transport.all_reduce(found, tuple(range(transport.size)), "max")
    found_inf.copy_(torch.where(found.to(before.device) > 0, 1.0, before))


def _value(x: Any) -> torch.Tensor:
    return plain(box(x, x._spec, whole_on_world(x._spec))) if is_global(x) else x


def _is_partial(g: Any) -> bool:
    return is_global(g) and any(entry.is_partial for entry in g.sbp)


def _checked(g: Any) -> torch.Tensor | None:
    """The shard that is checked and unscaled. Addends may be finite where their sum is not, so for
    a P gradient it is the sum, made for the check alone."""
    if not is_global(g):
        return g
    if _is_partial(g):
        spec: TensorSpec = g._spec
        return plain(rebox(g, spec.settled, "unscale"))
    return plain(g)


def _is_known_to_all(g: Any) -> bool:
    """Whether every rank of the world has checked all of it."""
    if not is_global(g):
        return True
    return g.placement.size == current().size and all(entry is B for entry in g.sbp)
