"""Changes that make optimizers and gradient clipping use foreach ops for global tensors.

Torch's code uses ``torch._foreach_*`` only for tensors of certain types, and groups tensors by
device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.clip_grad as clipping
import torch.optim.optimizer as optimizer
from torch.utils import _foreach_utils

from ..dispatch.planning.lists import foreach  # noqa: F401  (registers plans of foreach ops)
from ..dispatch.plans.shards import is_global
from ..tensor.global_tensor import GlobalTensor
from .redirect import redirect


def install() -> None:
    """Make torch's optimizers use foreach ops (``torch._foreach_*``) for global tensors.

    Their class is added to the supported types, and the function that groups parameters is
    replaced.
    """
    for supported_types in (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ):
        supported_types.append(GlobalTensor)
    redirect(torch._C._group_tensors_by_device_and_dtype, _group_tensors)
    for function in (clipping._get_total_norm, clipping._clip_grads_with_norm_):
        _clip_by_lists(function)


def _clip_by_lists(function: Any) -> None:
    """Make a clipping function of torch use foreach ops for global tensors whatever ``foreach`` is.

    Without them norms on several placements could not be combined, and a plain gradient would
    become global when it is multiplied by a global norm. ``function`` stays the object that others
    have imported; the function that it wraps with ``no_grad`` is replaced.
    """
    (cell,) = function.__closure__
    body = cell.cell_contents
    signature = inspect.signature(body)

    @functools.wraps(body)
    def clip(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
        bound = signature.bind(tensors, *args, **kwargs)
        if bound.arguments.get("foreach") is False and any(map(is_global, tensors)):
            bound.arguments["foreach"] = None
        return body(*bound.args, **bound.kwargs)

    cell.cell_contents = clip


def _group_tensors(group: Callable[..., Any], lists: Any, with_indices: bool = False) -> Any:
    """Implement ``torch._C._group_tensors_by_device_and_dtype``, with the same groups on all ranks.

    torch would use the shard's device, which is ``meta`` outside the placement, so the ranks would
    form different groups in a different order.

    Args:
        group: torch's function, for lists without global tensors.
        lists: lists of tensors of the same length; the first decides.
        with_indices: whether to return the indices of each group.
    """
    if not any(map(is_global, lists[0])):
        return group(lists, with_indices)
    positions: dict[Any, list[int]] = {}
    for i, first in enumerate(lists[0]):
        spec = first._spec if is_global(first) else None
        # By identity, because hashing a placement for each of many parameters is measurably slow.
        key = (first.device, first.dtype) if spec is None else (id(spec.placement), spec.dtype)
        positions.setdefault(key, []).append(i)
    groups: dict[tuple, list[int]] = {}
    for indices in positions.values():
        first = lists[0][indices[0]]
        groups.setdefault((first.device, first.dtype), []).extend(indices)
    # Sorted, because equal placements may be one object on some ranks and several on others, and
    # the order must be the same on all.
    return {key: _group_members(lists, sorted(i), with_indices) for key, i in groups.items()}


def _group_members(lists: Any, indices: list[int], with_indices: bool) -> tuple[list, list[int]]:
    """Return (the items of each list at ``indices``, the indices if they are asked for)."""
    is_whole_list = len(indices) == len(lists[0])
    columns = [
        list(values) if is_whole_list or not values else [values[i] for i in indices]
        for values in lists
    ]
    return columns, indices if with_indices else []
