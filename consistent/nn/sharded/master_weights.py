"""Let an optimizer step float32 copies of its parameters (``master_weights``).

```
          parameter          the step sees                 after it
weight    bf16, B    --->    its copy, f32, S(0)    --->   bf16, B: the copy, rounded
.grad     bf16, B    --->    f32, S(0)                     as it was
```

Steps that are smaller than the distance between two bfloat16 numbers accumulate in the copy. Copies
and the optimizer's state have the layout of the plan's ``step``, so ZeRO splits them over the
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
from .step import install_step_hooks

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
_MASTER_KEY = "master"  # key of the copy in a parameter's state in ``state_dict``
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def master_weights(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Make ``optimizer`` step copies in ``dtype`` of its bfloat16 and float16 parameters.

    The optimizer's state is in ``dtype``, too.

    ```
    model = consistent.parallelize(GPT().bfloat16(), placement, "zero1")
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ```

    Copies are made in the first step, and made again if a parameter was written to since the last
    step. They are part of ``optimizer.state_dict()``.

    Args:
        optimizer: any optimizer of global tensors, before its first step.
        dtype: the dtype of the copies.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: a bfloat16 or float16 parameter is a plain tensor.
        RuntimeError: the optimizer has state already, in the parameters' dtype.
    """
    _check_optimizer(optimizer)
    optimizer.__dict__["_masters"] = Masters(dtype)
    optimizer.register_state_dict_post_hook(_add_masters)
    optimizer.register_load_state_dict_pre_hook(_set_aside_loaded_state)
    optimizer.register_load_state_dict_post_hook(_restore_loaded_state)
    install_step_hooks()
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``master_weights`` cannot be used for ``optimizer``.

    Raises:
        TypeError: a bfloat16 or float16 parameter is a plain tensor.
        RuntimeError: the optimizer has stepped already.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype in _LOW_PRECISION and not is_global(p) for p in params):
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


class Masters:
    """Master weights of an optimizer: copies of its parameters in a longer dtype, which it steps.

    Args:
        dtype: the dtype of the copies.

    Attributes:
        copies: parameter -> (its copy, the version of the parameter from which the copy is).
        loading: state passed to ``load_state_dict``, set aside while torch loads its own part.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Parameter -> (its copy as a global tensor, version of the parameter that the copy is of;
        # -1 for a copy that was loaded, which counts as newer than the parameter).
        self.copies: dict[Any, tuple[Any, int]] = {}
        self.loading: dict[int, dict[str, Any]] = {}

    def copy_of(self, param: Any, part: Tensor, spec: TensorSpec) -> Tensor:
        """Return this rank's shard of the parameter's copy, which the optimizer steps.

        The copy is made if there is none, or if the parameter was written to since.

        Args:
            param: the parameter; if its dtype needs no copy, ``part`` is returned.
            part: the parameter's shard under ``spec``, the values of a new copy.
            spec: the layout of the step.
        """
        if param.dtype not in _LOW_PRECISION:
            return part
        copy_spec = spec.with_dtype(self.dtype)
        copy, writes = self.copies.get(param, (None, -1))
        if copy is None or (writes != -1 and self._is_older(param, copy, part, copy_spec)):
            copy = attach(part.to(self.dtype, memory_format=torch.contiguous_format), copy_spec)
        elif copy._spec is not copy_spec:  # loaded in another layout
            copy = rebox(copy, copy_spec, "master weights")
        self.copies[param] = copy, writes
        return plain(copy)

    def _is_older(self, param: Any, copy: Any, part: Tensor, copy_spec: TensorSpec) -> bool:
        """Return whether the copy of ``param`` is outdated.

        It is if ``param`` was written to since its last step. Writes through ``param.data`` do not
        raise the version of ``param``; if ``param.data`` was used, the values are compared.

        Args:
            param: the parameter.
            copy: its copy, a global tensor.
            part: the parameter's shard in the layout of the step.
            copy_spec: the spec of the step.
        """
        if self.copies[param][1] != param._version:
            return True
        same_layout = param._data_was_read and copy._spec is copy_spec and not part.is_meta
        return same_layout and not torch.equal(plain(copy).to(part.dtype), part)

    def mark_current(self, param: Any) -> None:
        """Note at the end of a step that the copy of ``param`` has its present values.

        A later write to ``param`` makes the copy outdated.
        """
        param._data_was_read = False
        if param in self.copies:
            self.copies[param] = self.copies[param][0], param._version

    def is_current(self, param: Any) -> bool:
        """Return whether ``param`` has a copy, and was not written to since its last step."""
        return param in self.copies and self.copies[param][1] in (-1, param._version)


def masters_of(optimizer: torch.optim.Optimizer) -> Masters | None:
    """Return the ``Masters`` of ``optimizer``; None if ``master_weights`` was not called for it."""
    return optimizer.__dict__.get("_masters")


def numbered_params(optimizer: Any) -> dict[int, Any]:
    """Return the optimizer's parameters by the numbers that they have in ``state_dict``."""
    params = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return dict(enumerate(params))


def _add_masters(optimizer: Any, state_dict: dict) -> None:
    """Add the copies to the state of their parameters, as ``"master"`` (state_dict post-hook)."""
    masters: Masters = optimizer.__dict__["_masters"]
    state_dict["state"] = state = dict(state_dict["state"])
    for number, param in numbered_params(optimizer).items():
        if param in masters.copies:
            if masters.is_current(param):
                state[number] = {**state.get(number, {}), _MASTER_KEY: masters.copies[param][0]}


def _set_aside_loaded_state(optimizer: Any, state_dict: dict) -> dict:
    """Return the state_dict that torch loads, without the copies (load_state_dict pre-hook).

    All loaded state is set aside in ``Masters.loading`` before, since torch converts what it loads
    to the parameters' dtype.
    """
    masters: Masters = optimizer.__dict__["_masters"]
    masters.loading = {
        number: dict(param_state) for number, param_state in state_dict["state"].items()
    }
    state = {
        number: {name: value for name, value in param_state.items() if name != _MASTER_KEY}
        for number, param_state in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _restore_loaded_state(optimizer: Any) -> None:
    """Restore copies and state in their own dtype, after torch has loaded the rest.

    A load_state_dict post-hook.
    """
    masters: Masters = optimizer.__dict__["_masters"]
    for number, param in numbered_params(optimizer).items():
        param_state = masters.loading.get(number, {})
        for name, value in param_state.items():
            if name == _MASTER_KEY:
                masters.copies[param] = _as_global(value, param).clone(), -1
            elif isinstance(value, Tensor) and value.shape == param.shape:
                optimizer.state[param][name] = loaded_state(param, value).clone()
    masters.loading = {}


def _as_global(value: Any, param: Any) -> Any:
    """Return a loaded copy of ``param`` as a global tensor; a plain ``value`` is the whole copy."""
    if is_global(value):
        return value
    return distribute(value.detach(), param.placement, step_spec(param).sbp)
