"""Which plain tensors of a call meet global ones: ranks compare them where its plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...movement import plain_values
from ...spec import Placement
from ..plans.plan import Answer, ByFacts, OtherCall, Plan
from ..plans.shards import is_global
from .functions.torch_functions import TorchFunction
from .without_modes import without_modes

# What these write into may be memory that torch.empty gave, which differs between ranks.
_FILLS = frozenset("copy fill index_copy index_put put scatter setitem zero".split())
# It keeps one flag a device, of its own.
_OWN_FLAGS = "_amp_foreach_non_finite_check_and_unscale"


def compare_plain(plan: Plan, function: TorchFunction, args: tuple, tensors: Sequence[Any]) -> Plan:
    """``plan``, after ranks have compared the plain tensors that its call meets.

    A plan that is to be compared again is not kept, so that the next call comes here too.
    """
    if all(map(is_global, tensors)) or not any(map(is_global, tensors)):
        return plan
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):  # pyright: ignore
        return plan  # refused when it runs
    if isinstance(plan, Answer | ByFacts) or function.name == _OWN_FLAGS:
        return plan  # a question sends nothing; facts come back with a plan
    is_list = function.name.startswith(("_foreach_", "_fused_"))
    if isinstance(plan, OtherCall) and not is_list:
        return plan  # what it calls is planned
    met = _in_lists(args) if is_list else _in_call(function, tensors)
    placement: Placement = next(x for x in tensors if is_global(x))._spec.placement
    described = [x._spec.layout if is_global(x) else (x.dtype, x.ndim) for x in tensors]
    kind = (function.name, function.inplace, frozenset(described) if is_list else tuple(described))
    with without_modes():
        again = plain_values.compare(function.name, met, placement, kind)
    plan.kept = plan.kept and not again
    return plan


def _in_call(function: TorchFunction, tensors: Sequence[Any]) -> list[torch.Tensor]:
    skipped = function.inplace and function.name in _FILLS
    return [x for x in (tensors[1:] if skipped else tensors) if not is_global(x)]


def _in_lists(args: tuple) -> list[torch.Tensor]:
    """Plain tensors at a position where another list has a global one. What is plain at its
    position may be a rank's own."""
    lists = [x for x in args if isinstance(x, tuple | list) and x]
    found: list[torch.Tensor] = []
    for at in zip(*lists):
        if any(map(is_global, at)):
            found += [x for x in at if isinstance(x, torch.Tensor) and not is_global(x) and x.ndim]
    return found
