"""Forward hooks that redistribute (box) the arguments and results of modules, as a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tensor.global_tensor import GlobalTensor
from .plan import Border, Nd, Plan


def install_borders(module: torch.nn.Module, plan: Plan) -> None:
    """Install hooks that box arguments and results of submodules as ``plan.modules`` says.

    To box a tensor is to redistribute it to another layout. ``parallelize`` calls this.
    """
    if not plan.modules:
        return
    for name, part in module.named_modules():
        border = plan.border(name)
        if border is None:
            continue
        if border.inputs:
            # Prepended, so that the module's other pre-hooks see the boxed arguments.
            part.register_forward_pre_hook(BoxInputs(border), with_kwargs=True, prepend=True)
        if border.outputs:
            part.register_forward_hook(BoxOutputs(border))


class BoxInputs:
    """Forward pre-hook that boxes (redistributes) tensor arguments of a module.

    A class and not a closure, so that a module with the hook can be copied and pickled.

    Args:
        border: the layouts of the arguments, by position or keyword.
    """

    def __init__(self, border: Border) -> None:
        self.border = border

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        layouts = self.border.inputs
        boxed = tuple(_box(x, layouts.get(i)) for i, x in enumerate(args))
        return boxed, {key: _box(x, layouts.get(key)) for key, x in kwargs.items()}


class BoxOutputs:
    """Forward hook that boxes (redistributes) tensors that a module returns.

    Args:
        border: the layouts of the results, by position or key.
    """

    def __init__(self, border: Border) -> None:
        self.border = border

    def __call__(self, module: torch.nn.Module, args: tuple, result: Any) -> Any:
        return box_outputs(result, self.border.outputs)


def box_outputs(result: Any, layouts: Mapping[int | str, Nd]) -> Any:
    """Box (redistribute) the tensors of a module's ``result`` that ``layouts`` names.

    Returns the result: a mapping is changed in place; a tuple or list is made again. ``BoxOutputs``
    uses it.

    Args:
        result: what the module's forward returned.
        layouts: position or key in ``result`` -> the layout to box that tensor to. A result that is
            a single tensor is at position 0.
    """
    if isinstance(result, torch.Tensor):
        return _box(result, layouts.get(0))
    if isinstance(result, Mapping):
        for i, key in enumerate(list(result)):
            nd = layouts.get(key, layouts.get(i))
            if nd is not None:
                result[key] = _box(result[key], nd)  # type: ignore[index]
        return result
    if isinstance(result, tuple | list):
        results = [_box(x, layouts.get(i)) for i, x in enumerate(result)]
        return type(result)(*results) if hasattr(result, "_fields") else type(result)(results)
    return result


def _box(x: Any, nd: Nd | None) -> Any:
    """Return ``x`` in the layout ``nd``; unchanged if ``nd`` is None or ``x`` is no global tensor.

    A None in ``nd`` keeps the layout along that axis: ``(None, B)`` makes ``(S(0), S(1))``
    ``(S(0), B)``.
    """
    if nd is None or not isinstance(x, GlobalTensor):
        return x
    sbp = tuple(old if new is None else new for old, new in zip(x.sbp, nd, strict=True))
    return x if sbp == x.sbp else x.to_global(sbp=sbp)
