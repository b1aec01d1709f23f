"""Stand-ins: tensors without values, on which a step can run without computing or communicating."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mirrored.transports.default import current, use
from mirrored.transports.outside import Outside

from ..dispatch import _C
from ..dispatch.plans.plan import use_plan_table
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..spec import TensorSpec


def stand_in(x: torch.Tensor) -> Any:
    """Return a tensor on ``meta`` in place of ``x``, with its shape, dtype and ``requires_grad``.

    For a global tensor it is a global one with the same spec.
    """
    if not is_global(x):
        return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)
    return stand_in_of_spec(x._spec, x.requires_grad)  # type: ignore[attr-defined]


def stand_in_of_spec(spec: TensorSpec, requires_grad: bool = False) -> Any:
    """Return a global tensor with this spec and without values.

    It is what a rank outside the placement has in place of the tensor.
    """
    shape = spec.local_shape(None)
    local = torch.empty(shape, dtype=spec.dtype, device="meta", requires_grad=requires_grad)
    return attach(local, spec)


@contextmanager
def swap_parameters(modules: Iterable[torch.nn.Module]) -> Iterator[dict[int, Any]]:
    """Replace the global parameters and buffers of ``modules`` by stand-ins inside the block.

    Yields {id of a stand-in: (module, key of the parameter)}. A tensor that several modules share
    has one stand-in.
    """
    originals: list[tuple[dict, str, Any]] = []
    places: dict[int, Any] = {}
    stand_ins: dict[int, Any] = {}
    try:
        for module in modules:
            for store in (module._parameters, module._buffers):
                for key, x in list(store.items()):
                    if x is None or not is_global(x):
                        continue
                    if id(x) not in stand_ins:
                        stand_ins[id(x)] = stand_in(x)
                        places[id(stand_ins[id(x)])] = module, key
                    # Noted before it is replaced, so that an error cannot leave a stand-in behind.
                    originals.append((store, key, x))
                    store[key] = stand_ins[id(x)]
        yield places
    finally:
        for store, key, x in reversed(originals):
            store[key] = x


@contextmanager
def outside_all_placements(
    why: str, size: int | None = None, plan_each: bool = False
) -> Iterator[None]:
    """Run the block as a rank outside all placements, which computes and sends nothing.

    Programs are recorded and simulated in it. The block does not advance the random numbers of the
    program, and the plans of ops that it makes are dropped afterwards.

    Args:
        why: text of the error that is raised where the block would send.
        size: number of ranks of the world; None for the current number.
        plan_each: plan each call for its own sizes, so that no plan serves several sizes.
    """
    transport = current()
    outside_transport = Outside(transport, why, transport.size if size is None else size)
    with (
        use_plan_table(_C.PlanTable(plan_each)),
        use(outside_transport),
        generator.separate_state(generator.get_state()),
    ):
        yield
