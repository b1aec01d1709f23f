"""Changes for ``torch.distributed.checkpoint``, which copies tensors before an asynchronous save.

Of a global tensor it then copies the shard. The modules concerned take seconds to import, and most
programs never import them. So they are changed when they are imported, if that is after the first
global tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mirrored.transports.default import current

from ..dispatch.plans.shards import is_global, plain
from ..tensor.storage.in_checkpoints import copy_of_shard
from .on_import import change_module


def _change_stager(module: Any) -> None:
    """Make ``async_save`` with torch's own stager copy the shards of global tensors.

    ``module`` is torch's module that defines the stager.
    """
    stager = module.StateDictStager
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def offload_tensor(self: Any, x: Any, memo: dict, non_blocking: bool = False) -> Any:
        if not is_global(x):
            return offload(self, x, memo, non_blocking)
        copy = memo[id(x)] = copy_of_shard(x)
        return copy

    stager._offload_tensor = offload_tensor


def _change_state_dict_utils(module: Any) -> None:
    """Make torch's utilities for state dicts, in ``module``, handle global tensors.

    ``async_save`` with a ``FileSystemWriter`` calls them, and so do the functions that gather whole
    state dicts on one rank or all.
    """
    iterate = module._iterate_state_dict

    @functools.wraps(iterate)
    def iterate_state_dict(value: Any, *functions: Any, **options: Any) -> Any:
        if not is_global(value):
            return iterate(value, *functions, **options)
        callers = " ".join(function.__qualname__ for function in functions)
        return _state_of_global(value, callers, **options)

    module._iterate_state_dict = iterate_state_dict


def _state_of_global(
    x: Any,
    callers: str,
    *,
    companion_obj: Any = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    **_: Any,
) -> Any:
    """Return what torch's ``_iterate_state_dict`` is to return for a global tensor.

    Args:
        x: the tensor.
        callers: names of the functions that torch passes on, which show who has called.
            ``_create_cpu_state_dict`` gets a copy of the shard, and ``_gather_state_dict`` the
            whole value; else ``x`` is copied into ``companion_obj``.
        companion_obj: tensor to copy into, or None.
        cpu_offload: whether a whole value is moved to the CPU.
        ranks_only: ranks that keep a whole value; all if empty.
    """
    if "_create_cpu_state_dict" in callers:
        return copy_of_shard(x)
    if "_gather_state_dict" in callers:  # StateDictOptions(full_state_dict=True)
        # A collective, so on every rank, also on those that keep nothing.
        whole = x.full()
        keeps = not ranks_only or current().rank in ranks_only
        return (whole.cpu() if cpu_offload else whole) if keeps else None
    if companion_obj is not None:
        if is_global(companion_obj):
            companion_obj.copy_(x)
        elif companion_obj.numel():
            companion_obj.as_subclass(torch.Tensor).copy_(plain(x).detach())
        return companion_obj
    return x


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.distributed.checkpoint._state_dict_stager": _change_stager,
    "torch.distributed._state_dict_utils": _change_state_dict_utils,
}


def install() -> None:
    """Change the modules that are imported already, and the others when they are imported."""
    for name, change in _CHANGES.items():
        change_module(name, change)
