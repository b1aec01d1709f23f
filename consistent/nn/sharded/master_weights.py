"""master_weights: an optimizer that steps copies of its parameters in float32.

```
          parameter          the step sees                 after it
weight    bf16, B    --->    its copy, f32, S(0)    --->   bf16, B: the copy, rounded
.grad     bf16, B    --->    f32, S(0)                     as it was
```

Steps that are smaller than the distance between two numbers in bfloat16 add up in the copy.
Copies and the optimizer's state lie as the plan's ``step`` says, so that ZeRO splits them over the
ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ...dispatch.plans.shards import attach, is_global, plain, rebox
from ...spec import TensorSpec
from ...tensor.making.create import distribute
from ...tensor.storage.step_layout import loaded_state, step_spec
from .step import install_hooks

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
_NAME = "master"  # in the state of a parameter, where the state is saved
_LOW = (torch.bfloat16, torch.float16)


def master_weights(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Let ``optimizer`` keep a copy in ``dtype`` of each parameter of a shorter dtype, and step
    that. Its state is in ``dtype`` too.

    ```
    model = consistent.parallelize(GPT().bfloat16(), placement, "zero1")
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ```

    Copies are made of the parameters in the first step, and again where a parameter was written to
    since the last one. They are part of ``optimizer.state_dict()``.

    Args:
        optimizer: any, before its first step, whose parameters are global tensors.
        dtype: of the copies.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: a parameter of a shorter dtype is a plain tensor.
        RuntimeError: the optimizer has state, which is in the parameters' dtype.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype in _LOW and not is_global(p) for p in params):
        raise TypeError(
            "master_weights: a parameter is a plain tensor, and copies are kept of global ones. "
            "Call consistent.parallelize(model, placement, plan) first, and make the optimizer of "
            "model.parameters() after it."
        )
    if any(optimizer.state.get(p) for p in params):
        raise RuntimeError(
            "master_weights: the optimizer has stepped already, and its state is in the dtype of "
            "the parameters. Call master_weights before the first step, and before "
            "load_state_dict."
        )
    optimizer.__dict__["_masters"] = Masters(dtype)
    optimizer.register_state_dict_post_hook(_add_masters)
    optimizer.register_load_state_dict_pre_hook(_set_aside)
    optimizer.register_load_state_dict_post_hook(_bring_back)
    install_hooks()
    return optimizer


class Masters:
    """The copies of an optimizer's parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Parameter -> its copy as a global tensor, and the count of writes into the parameter.
        self.copies: dict[Any, tuple[Any, int]] = {}
        self.loading: dict[int, dict[str, Any]] = {}

    def of(self, param: Any, part: Tensor, spec: TensorSpec) -> Tensor:
        """The shard of the copy under ``spec``, whose values are ``part`` if it is new."""
        if param.dtype not in _LOW:
            return part
        laid = spec.with_dtype(self.dtype)
        copy, writes = self.copies.get(param, (None, -1))
        if copy is None or (writes != -1 and self._is_older(param, copy, part, laid)):
            copy = attach(part.to(self.dtype, memory_format=torch.contiguous_format), laid)
        elif copy._spec is not laid:  # loaded in another layout
            copy = rebox(copy, laid, "master weights")
        self.copies[param] = copy, writes
        return plain(copy)

    def _is_older(self, param: Any, copy: Any, part: Tensor, laid: TensorSpec) -> bool:
        """Whether ``param`` was written to since the last step, by ``param.data`` too, whose writes
        torch counts apart: then the values say it."""
        if self.copies[param][1] != param._version:
            return True
        same_layout = param._data_given and copy._spec is laid and not part.is_meta
        return same_layout and not torch.equal(plain(copy).to(part.dtype), part)

    def keep(self, param: Any) -> None:
        """The step has ended: what is written into ``param`` from now on is newer."""
        param._data_given = False
        if param in self.copies:
            self.copies[param] = self.copies[param][0], param._version

    def is_kept(self, param: Any) -> bool:
        """Whether the copy of ``param`` is newer than all writes into it."""
        return param in self.copies and self.copies[param][1] in (-1, param._version)


def masters_of(optimizer: torch.optim.Optimizer) -> Masters | None:
    """The copies that ``optimizer`` keeps; None if ``master_weights`` was not called for it."""
    return optimizer.__dict__.get("_masters")


def ordered(optimizer: Any) -> dict[int, Any]:
    """Parameters by the numbers that they have in ``state_dict``."""
    params = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return dict(enumerate(params))


def _add_masters(optimizer: Any, state_dict: dict) -> None:
    masters: Masters = optimizer.__dict__["_masters"]
    state_dict["state"] = state = dict(state_dict["state"])
    for number, param in ordered(optimizer).items():
        if param in masters.copies:
            if masters.is_kept(param):
                state[number] = {**state.get(number, {}), _NAME: masters.copies[param][0]}


def _set_aside(optimizer: Any, state_dict: dict) -> dict:
    """Torch would convert all state to the parameters' dtype."""
    masters: Masters = optimizer.__dict__["_masters"]
    masters.loading = {number: dict(kept) for number, kept in state_dict["state"].items()}
    state = {
        number: {name: value for name, value in kept.items() if name != _NAME}
        for number, kept in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _bring_back(optimizer: Any) -> None:
    masters: Masters = optimizer.__dict__["_masters"]
    for number, param in ordered(optimizer).items():
        kept = masters.loading.get(number, {})
        for name, value in kept.items():
            if name == _NAME:
                masters.copies[param] = _global(value, param).clone(), -1
            elif isinstance(value, Tensor) and value.shape == param.shape:
                optimizer.state[param][name] = loaded_state(param, value).clone()
    masters.loading = {}


def _global(value: Any, param: Any) -> Any:
    """A copy that was saved whole, or as it lay."""
    if is_global(value):
        return value
    return distribute(value.detach(), param.placement, step_spec(param).sbp)
