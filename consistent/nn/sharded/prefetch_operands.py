"""Prefetch parameters that ops gather themselves: those of the next op while this op runs.

```
program    linear 0 (gathers 0)   send for 1   linear 1   send for 2   linear 2
messages                          gather 1 ..............  gather 2 ........
```

This serves parameters that are used in their stored, split layout, if an op finds it cheaper to
gather its weight than its input. The next parameters are predicted from the last call of the
module, as for parameters that a module gathers (``order.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.backward import pass_count
from ...dispatch.plans.shards import HookOff, is_global, plain
from ...movement.several import Route
from ...spec import TensorSpec
from ...spec.tracer import Tracer
from ..plan import Plan
from .order import GatherOrder, GatherOrders, take_prefetched
from .prefetch import Wanted, by_messages

_PLACE = "_consistent_place"
# (module, key in it, spec to gather to) of each parameter of an op.
_Key = tuple[tuple[nn.Module, str, TensorSpec], ...]


class _OperandOrders(GatherOrders):
    """Gather orders of the parameters that ops gather themselves.

    No hook runs where a forward begins, so its order restarts at the first op after a backward.
    """

    def __init__(self) -> None:
        super().__init__(by_messages())
        self._passes_at_start = -1

    def current_order(self) -> GatherOrder:
        order = super().current_order()
        if order is self.forward and self._passes_at_start != pass_count():
            self._passes_at_start = pass_count()
            order.restart()
        return order


class _ParameterPlace:
    """Where a parameter is in a module, stored with the parameter for prefetching.

    Args:
        orders: the orders in which ops gather the module's parameters.
        owner, key: the submodule that has the parameter, and its key there.
    """

    def __init__(self, orders: GatherOrders, owner: nn.Module, key: str) -> None:
        self.orders, self.owner, self.key = orders, owner, key

    def __deepcopy__(self, memo: dict) -> _ParameterPlace | None:
        owner = memo.get(id(self.owner))
        if owner is None:  # the parameter is copied without its module
            return None
        return _ParameterPlace(memo.setdefault(id(self.orders), _OperandOrders()), owner, self.key)

    def __reduce__(self) -> Any:
        return (type(None), ())


def install_operand_prefetch(module: nn.Module, plan: Plan) -> None:
    """Make ops in ``module`` prefetch the parameters that the next op is expected to gather.

    Only parameters that are used in their stored, split layout are concerned, since modules gather
    the others (``install_use``).
    """
    orders = _OperandOrders()
    for name, param in module.named_parameters(remove_duplicate=False):
        layouts = plan.layouts(name)
        if not is_global(param) or layouts is None or layouts.use != layouts.sbp:
            continue
        if any(entry.is_split for entry in layouts.sbp):
            path, _, key = name.rpartition(".")
            setattr(param, _PLACE, _ParameterPlace(orders, module.get_submodule(path), key))


def drop_operand_prefetches(module: nn.Module) -> None:
    """Wait for prefetches of the parameters of ``module``, and drop their results."""
    places = [param.__dict__.get(_PLACE) for param in module.parameters()]
    for orders in dict.fromkeys(place.orders for place in places if place is not None):
        orders.drop()


def forget_place(param: Any) -> None:
    """Undo ``install_operand_prefetch`` for one parameter."""
    param.__dict__.pop(_PLACE, None)


def _take_prefetched(
    operands: Sequence[Any], routes: Sequence[Route]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """Return the prefetched values of an op's operands, and a function that prefetches the next.

    The dispatcher calls it before an op that gathers operands. Values that were not prefetched are
    None.

    Args:
        operands: the operands that the op gathers.
        routes: (stored spec, spec to gather to) of each.
    """
    places = [x.__dict__.get(_PLACE) for x in operands]
    key: _Key = tuple(
        (place.owner, place.key, dst)
        for x, place, (_, dst) in zip(operands, places, routes, strict=True)
        if place is not None and place.owner._parameters.get(place.key) is x
    )
    if not key:
        return [None] * len(operands), _do_nothing
    order = next(place.orders for place in places if place is not None).current_order()
    prefetch = order.record_gather(key)
    with torch.no_grad(), HookOff():
        values = [
            None if place is None else take_prefetched(prefetch, plain(x).detach(), dst)
            for x, place, (_, dst) in zip(operands, places, routes, strict=True)
        ]
    return values, partial(order.prefetch_next, key, _wanted_of)


def _wanted_of(key: _Key) -> list[Wanted]:
    """Return the shards and specs of the parameters of ``key``, to start their prefetch."""
    parameters = []
    with torch.no_grad(), HookOff():
        for owner, name, dst in key:
            param: Any = owner._parameters.get(name)
            if is_global(param) and param._spec.with_sbp(dst.sbp) is dst:
                parameters.append((plain(param).detach(), param._spec, dst, None))
    return parameters


def _do_nothing() -> None:
    pass


Tracer(handle_ahead=_take_prefetched).install()
