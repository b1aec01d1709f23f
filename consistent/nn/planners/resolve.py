"""Resolve the patterns of a plan against the tensors and modules of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...spec import B, Placement, Sbp, Split, resolve_sbp
from ...spec.nearest import suggestion
from ..codecs import check_codecs
from ..plan import Border, Layouts, Plan
from ..plan.names import match, match_path
from ..slots import Slot


def resolve(
    module: torch.nn.Module,
    tensors: Sequence[Sequence[Slot]],
    placement: Placement,
    plan: Plan,
) -> Plan:
    """Return ``plan`` with an entry for each tensor by its first name, and no patterns.

    ``{"*.weight": S(0)}`` becomes ``{"fc.weight": S(0), "fc.bias": B}``. Layouts are checked.

    Args:
        module: the module.
        tensors: for each tensor, the places in the module that hold it.
        placement: the placement of all tensors.
        plan: the plan.

    Raises:
        ValueError: a pattern matches nothing, a layout does not fit its tensor's shape, or tied
            names disagree.
    """
    check_names(module, [slot.name for places in tensors for slot in places], plan)
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    check_modules(module, modules, plan)
    return Plan(
        {places[0].name: _layouts_of(places, placement, plan) for places in tensors},
        {name: _check_border(name, b, placement) for name in modules if (b := plan.border(name))},
        axes=placement.axes or plan.axes,
        notes=plan.notes,
        tied={slot.name: places[0].name for places in tensors for slot in places[1:]},
        shapes={places[0].name: tuple(places[0].value.shape) for places in tensors},
        keep_bytes=plan.keep_bytes,
    )


def check_names(module: torch.nn.Module, names: Sequence[str], plan: Plan) -> None:
    """Raise ``ValueError`` if a pattern for tensors in ``plan`` matches none of ``names``."""
    known = set(names)
    for pattern in plan.tensors:
        if pattern not in known and not any(match(name, {pattern: None}) for name in names):
            examples = ", ".join(sorted(set(names))[:8])
            raise ValueError(
                f"parallelize: pattern {pattern!r} matches no parameter or buffer of "
                f"{type(module).__name__}.{suggestion(pattern, names)} "
                f"Names are such as {examples}; list them with "
                "module.named_parameters(remove_duplicate=False)."
            )


def check_modules(module: torch.nn.Module, names: Sequence[str], plan: Plan) -> None:
    """Raise ``ValueError`` if a pattern for modules in ``plan`` matches none of ``names``."""
    known = set(names)
    for pattern in plan.modules:
        if pattern not in known and all(
            match_path(name, {pattern: None}) is None for name in names
        ):
            raise ValueError(
                f"parallelize: {pattern!r} is not a module of {type(module).__name__}."
                f"{suggestion(pattern, names)} List them with module.named_modules()."
            )


def _layouts_of(places: Sequence[Slot], placement: Placement, plan: Plan) -> Layouts:
    """Return the layouts that the plan gives a tensor by any of its names; B without a match.

    The pattern ``"*"`` counts only if no other pattern matches one of the names.

    Args:
        places: all places in the module that hold the tensor; several if it is tied.
        placement: its placement.
        plan: the plan.

    Raises:
        ValueError: the names of a tied tensor get different layouts, or an SBP does not fit.
    """
    matches = [(slot, match(slot.name, plan.tensors)) for slot in places]
    used_matches = [(slot, pattern) for slot, pattern in matches if pattern not in (None, "*")]
    used_matches = used_matches or [
        (slot, pattern) for slot, pattern in matches if pattern is not None
    ]
    entries = [
        (slot.name, _resolve_layouts(slot, p, plan.tensors[p], placement))
        for slot, p in used_matches
        if p
    ]
    for name, layouts in entries:
        if layouts != entries[0][1]:
            raise ValueError(
                f"parallelize: {entries[0][0]!r} and {name!r} are one tensor (tied), and the plan "
                f"gives it {entries[0][1].sbp} and {layouts.sbp}. Give both names the same SBP, or "
                "one of them only."
            )
    return entries[0][1] if entries else Layouts((B,) * placement.ndim)


def _resolve_layouts(slot: Slot, pattern: str, layouts: Layouts, placement: Placement) -> Layouts:
    """Return ``layouts``, checked against the shape of a tensor, with dims counted from the front.

    ``S(-1)`` of a matrix becomes ``S(1)``. A tensor without dims, such as a step counter, cannot be
    split. It becomes B where ``pattern`` matched it, and is an error where that is its exact name.
    """
    no_dims = slot.value.ndim == 0 and pattern != slot.name  # such as a counter among weights

    def fit(sbp: tuple[Sbp, ...]) -> tuple[Sbp, ...]:
        if no_dims:
            sbp = tuple(B if isinstance(entry, Split) else entry for entry in sbp)
        return resolve_sbp(sbp, placement, slot.value.shape)

    try:
        resolved = layouts.map(fit)
    except ValueError as error:
        raise ValueError(f"parallelize: pattern {pattern!r} for {slot.name!r}: {error}") from None
    check_codecs(slot.name, resolved, placement, slot.value.dtype)
    return resolved


def _check_border(name: str, border: Border, placement: Placement) -> Border:
    """Return ``border``; raise ValueError if a layout of it has not an entry for each axis."""
    for layouts in (border.inputs, border.outputs):
        for key, nd in layouts.items():
            if len(nd) != placement.ndim:
                raise ValueError(
                    f"parallelize: at the border of {name!r}, {key!r} has {len(nd)} SBPs, and "
                    f"{placement} has {placement.ndim} axes. Give one for each axis, None to "
                    "leave it as it is."
                )
    return border
