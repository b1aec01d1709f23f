"""``load_state_dict(state, assign=True)`` of a module whose tensors are global.

Torch would put the state's tensors in place of the module's, and with them the layouts would be
gone. So each tensor of the module takes over what the state has for it, values and dtype, and stays
the object that it is, in the layout that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..dispatch.plans.shards import is_global


def install_assign(modules: Iterable[nn.Module]) -> None:
    """Let these modules keep their tensors' layouts when a state is assigned to them."""
    for module in modules:
        hooks = module._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _keep_layouts for hook in hooks):
            module.register_load_state_dict_pre_hook(_keep_layouts)


@torch.no_grad()
def _keep_layouts(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict, *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for key, own in [*module._parameters.items(), *module._buffers.items()]:
        given = state.get(prefix + key)
        if not is_global(own) or not isinstance(given, torch.Tensor) or given is own:
            continue
        if own.ndim == 0 and given.shape == (1,):  # as torch takes it
            given = given[0]
        if given.shape == own.shape and not given.is_meta:  # else torch says what is wrong
            own.data = _laid(given, own)
            state[prefix + key] = own


def _laid(given: Any, own: Any) -> Any:
    if is_global(given):
        return given.detach().to_global(placement=own.placement, sbp=own.sbp)
    return given.detach()
