"""Support ``load_state_dict(state, assign=True)`` for modules whose tensors are global.

Torch would replace the module's tensors by those of the state, and their layouts would be lost.
Instead, each tensor of the module takes over the values and the dtype from the state, and stays the
same object in the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..dispatch.plans.shards import is_global


def install_assign(modules: Iterable[nn.Module]) -> None:
    """Make ``modules`` keep their tensors' layouts under ``load_state_dict(..., assign=True)``.

    Installs a load_state_dict pre-hook on each module; a module that has it already is skipped.
    """
    for module in modules:
        hooks = module._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _keep_layouts for hook in hooks):
            module.register_load_state_dict_pre_hook(_keep_layouts)


@torch.no_grad()
def _keep_layouts(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict, *_: Any
) -> None:
    """Copy the state's values into the module's own tensors, if ``assign=True`` was given.

    A load_state_dict pre-hook. The entries of ``state`` become the module's own tensors, so the
    assignment by torch that follows changes nothing.
    """
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for key, own in [*module._parameters.items(), *module._buffers.items()]:
        loaded = state.get(prefix + key)
        if not is_global(own) or not isinstance(loaded, torch.Tensor) or loaded is own:
            continue
        if own.ndim == 0 and loaded.shape == (1,):  # torch accepts these old checkpoints, too
            loaded = loaded[0]
        if loaded.shape == own.shape and not loaded.is_meta:  # otherwise torch reports the error
            own.data = _box_like(loaded, own)
            # Torch then "assigns" the module's own tensor to the module.
            state[prefix + key] = own


def _box_like(loaded: Any, own: Any) -> Any:
    """Return a loaded tensor, boxed (redistributed) to the layout of ``own`` if it is global."""
    if is_global(loaded):
        return loaded.detach().to_global(placement=own.placement, sbp=own.sbp)
    return loaded.detach()
