"""Comparison, at planning time, of the plain tensors that a call mixes with global tensors.

All ranks must hold equal values in such a plain tensor, so they compare it when they make the plan.
"""

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

# The target of these may be uninitialized memory from torch.empty, which differs between ranks.
_FILLS = frozenset("copy fill index_copy index_put put scatter setitem zero".split())
# GradScaler's op keeps a flag for each device, which is a rank's own.
_GRAD_SCALER_OP = "_amp_foreach_non_finite_check_and_unscale"


def compare_plain(plan: Plan, function: TorchFunction, args: tuple, tensors: Sequence[Any]) -> Plan:
    """Compare the plain tensors of this call between ranks when it is planned, and return ``plan``.

    A plain tensor next to global ones counts as B, so its values must be equal on all ranks. If
    later calls of this kind have to be compared as well, ``plan.kept`` is set to False: the plan is
    not cached, and the next such call is planned and compared again. ``tensors`` are those in the
    arguments.
    """
    if all(map(is_global, tensors)) or not any(map(is_global, tensors)):
        return plan
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):  # pyright: ignore
        return plan  # raises when it runs
    if isinstance(plan, Answer | ByFacts) or function.name == _GRAD_SCALER_OP:
        return plan  # a query may not communicate; ByFacts is followed by the real plan
    is_list = function.name.startswith(("_foreach_", "_fused_"))
    if isinstance(plan, OtherCall) and not is_list:
        return plan  # the calls that it makes are planned, and compare then
    plain_tensors = (
        _plain_tensors_of_lists(args) if is_list else _plain_tensors_of_call(function, tensors)
    )
    placement: Placement = next(x for x in tensors if is_global(x))._spec.placement
    descriptions = [x._spec.layout if is_global(x) else (x.dtype, x.ndim) for x in tensors]
    # A set for ops over lists, so that the number of kinds does not depend on the lists' lengths.
    kind = (
        function.name,
        function.inplace,
        frozenset(descriptions) if is_list else tuple(descriptions),
    )
    with without_modes():
        compares_again = plain_values.compare_plain(function.name, plain_tensors, placement, kind)
    plan.kept = plan.kept and not compares_again
    return plan


def _plain_tensors_of_call(function: TorchFunction, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the plain tensors of an ordinary op that have to be compared between ranks.

    The target of in-place ops such as ``copy_`` is left out: it may be uninitialized memory.
    """
    skips_target = function.inplace and function.name in _FILLS
    return [x for x in (tensors[1:] if skips_target else tensors) if not is_global(x)]


def _plain_tensors_of_lists(args: tuple) -> list[torch.Tensor]:
    """Return the plain tensors of an op over lists that have to be compared between ranks.

    They are those that belong together with a global tensor, by being at the same index of their
    lists. Where all tensors at an index are plain, each rank may have values of its own; 0-d
    tensors, such as step counts, are not compared.
    """
    lists = [x for x in args if isinstance(x, tuple | list) and x]
    plain_tensors: list[torch.Tensor] = []
    for position in zip(*lists):
        if any(map(is_global, position)):
            plain_tensors += [
                x for x in position if isinstance(x, torch.Tensor) and not is_global(x) and x.ndim
            ]
    return plain_tensors
