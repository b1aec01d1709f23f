"""Tensors without values in place of a program's own, so that it can be followed without running
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mirrored.transports.default import current, use
from mirrored.transports.outside import Outside

from ..dispatch import _C
from ..dispatch.plans.plan import looked_up_in
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..spec import TensorSpec


def stand_in(x: torch.Tensor) -> Any:
    """A tensor like ``x`` on ``meta``."""
    if not is_global(x):
        return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)
    return of_spec(x._spec, x.requires_grad)  # type: ignore[attr-defined]


def of_spec(spec: TensorSpec, requires_grad: bool = False) -> Any:
    """A global tensor without values, as a rank outside its placement has it."""
    shape = spec.local_shape(None)
    local = torch.empty(shape, dtype=spec.dtype, device="meta", requires_grad=requires_grad)
    return attach(local, spec)


@contextmanager
def swapped(modules: Iterable[torch.nn.Module]) -> Iterator[dict[int, Any]]:
    """Inside, ``modules`` hold stand-ins for their global tensors. Gives stand-in's id -> (module,
    key)."""
    kept: list[tuple[dict, str, Any]] = []
    places: dict[int, Any] = {}
    made: dict[int, Any] = {}
    try:
        for module in modules:
            for store in (module._parameters, module._buffers):
                for key, x in list(store.items()):
                    if x is None or not is_global(x):
                        continue
                    if id(x) not in made:
                        made[id(x)] = stand_in(x)
                        places[id(made[id(x)])] = module, key
                    kept.append((store, key, x))
                    store[key] = made[id(x)]
        yield places
    finally:
        for store, key, x in reversed(kept):
            store[key] = x


@contextmanager
def outside(why: str, size: int | None = None, plan_each: bool = False) -> Iterator[None]:
    """Inside, this rank is in no placement, sends nothing, and draws no random numbers of the
    program's. Its plans are forgotten after.

    Args:
        why: the error where it would send.
        size: the number of ranks of the world; None: as many as there are.
        plan_each: plan each call by its own sizes.
    """
    transport = current()
    following = Outside(transport, why, transport.size if size is None else size)
    with (
        looked_up_in(_C.PlanTable(plan_each)),
        use(following),
        generator.separate(generator.get_state()),
    ):
        yield
