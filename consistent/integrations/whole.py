"""Global tensors in what libraries keep or write, as whole plain ones, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirrored.transports.default import current

from ..data.nested import mapped
from ..dispatch.plans.shards import is_global
from ..nn.parallelize import plan_of
from ..spec import NdSbp
from ..tensor.making.create import distribute


def whole(x: Any) -> Any:
    """``x`` with plain whole tensors in place of global ones, in any nesting. A collective."""
    known: dict[int, Tensor] = {}

    def made(_: Any, value: Tensor) -> Tensor:
        if not is_global(value):
            return value
        if id(value) not in known:  # a tied weight stays one tensor
            known[id(value)] = value.full()  # type: ignore[attr-defined]
        return known[id(value)]

    return mapped(made, x)


def whole_on_first(x: Any) -> Any:
    """The same on rank 0; elsewhere None, and never more than one whole tensor at a time."""
    first = current().rank == 0
    found = mapped(
        lambda _, v: _kept(v.full(), first) if is_global(v) else v,  # type: ignore[attr-defined]
        x,
    )
    return found if first else None


def _kept(value: Tensor, keep: bool) -> Tensor:
    return value if keep else torch.empty(0)


def take_plain_states(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let ``optimizer.load_state_dict`` take whole plain states, as one process saved them: each
    is laid out as the plan says that its parameter's optimizer sees it."""
    steps = _steps(model)

    def lay_out(target: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        params = [p for group in target.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        by_id = dict(zip(ids, params))
        laid = {i: _laid(by_id.get(i), s, steps) for i, s in state_dict["state"].items()}
        return {**state_dict, "state": laid}

    optimizer.register_load_state_dict_pre_hook(lay_out)


def _steps(model: nn.Module) -> dict[int, NdSbp]:
    """How the optimizer sees each parameter."""
    plan = plan_of(model)
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        layouts = plan.layouts(name)
        if layouts is not None:
            found[id(param)] = layouts.step
    return found


def _laid(param: Any, state: Any, steps: dict[int, NdSbp]) -> Any:
    if not is_global(param) or not isinstance(state, dict):
        return state
    sbp = steps.get(id(param), param.sbp)
    return {
        key: distribute(value, param.placement, sbp)
        if isinstance(value, Tensor) and not is_global(value) and value.shape == param.shape
        else value
        for key, value in state.items()
    }
