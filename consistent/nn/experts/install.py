"""Install the forwards by which modules of experts send tokens to the ranks of their experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...spec import B, Split
from ..plan import Plan
from .forward import ExpertsForward
from .kinds import takes_routed_tokens
from .list_forward import install_list, uninstall_list
from .lists import expert_lists
from .replaced import restore_forward


def install_experts(module: nn.Module, plan: Plan) -> None:
    """Make modules whose experts ``plan`` divides among ranks send tokens to these ranks.

    ``parallelize`` calls this. Modules may be stacks of experts, or loop over a list of them.
    """
    for name, part in module.named_modules():
        if not isinstance(part.__dict__.get("forward"), ExpertsForward) and takes_routed_tokens(
            part
        ):
            axes, inside = _axes_of_experts(
                [plan.layouts(f"{name}.{key}") for key in part._parameters]
            )
            if axes:
                ExpertsForward(part, axes, inside).install()
    for expert_list in expert_lists(module):
        install_list(expert_list, plan)


def _axes_of_experts(all_layouts: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (axes that divide the experts among ranks, axes that split each expert's weights).

    On an axis of the first kind, every tensor of the module must be S(0). Both tuples are empty if
    the layouts do not allow sending tokens.

    Args:
        all_layouts: the layouts of the module's tensors, None for one without layouts.
    """
    if None in all_layouts:
        return (), ()
    axes, inside = list[int](), list[int]()
    for axis, entries in enumerate(zip(*(layouts.use for layouts in all_layouts), strict=True)):
        if all(entry == Split(0) for entry in entries):
            axes.append(axis)
        elif any(entry == Split(0) or not (entry is B or entry.is_split) for entry in entries):
            return (), ()
        elif any(entry is not B for entry in entries):
            inside.append(axis)
    return tuple(axes), tuple(inside)


def uninstall_experts(module: nn.Module) -> None:
    """Undo ``install_experts``."""
    for part in module.modules():
        uninstall_list(part)
        if isinstance(part.__dict__.get("forward"), ExpertsForward):
            restore_forward(part)
