"""parallelize: turn an ordinary module's parameters and buffers into global tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch

from ..spec import B, NdSbp, Placement, SbpLike, resolve_sbp
from ..tensor.create import distribute
from ..tensor.global_tensor import GlobalTensor
from ..tensor.scope import chosen


def parallelize(
    module: torch.nn.Module,
    placement: Placement | None = None,
    plan: Mapping[str, SbpLike] | None = None,
    *,
    check: bool = False,
) -> torch.nn.Module:
    """Make every parameter and buffer of ``module`` a global tensor, in place; its code is not
    touched.

    Args:
        module: the same module with the same values on every rank (seed alike, or load the
            same file).
        placement: where all of it goes; without it, where the ``placement_scope`` says.
        plan: name pattern -> SBP, such as ``{"*.fc1.weight": S(0), "lm_head.*": S(0)}``. A pattern
            matches whole parameter or buffer names as in ``fnmatch``; the first that matches
            counts; names that no pattern
            matches are B (data parallel).
        check: verify that the values are equal on all ranks. A collective per tensor.

    Returns:
        ``module``.

    Raises:
        ValueError: a pattern matches nothing, or an SBP does not fit the tensor it is for.
    """
    placement, _ = chosen("parallelize", placement, B)
    patterns = dict(plan or {})
    entries = _entries(module)
    unused = [
        p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for _, _, name, _ in entries)
    ]
    if unused:
        names = ", ".join(sorted({name for _, _, name, _ in entries})[:8])
        raise ValueError(
            f"parallelize: pattern {unused[0]!r} matches no parameter or buffer of "
            f"{type(module).__name__}. "
            f"Names are such as {names}; list them with module.named_parameters()."
        )
    # All are made before any is put in place, so that an error leaves the module as it was.
    made: dict[int, torch.Tensor] = {}
    first: dict[int, tuple[str, NdSbp]] = {}
    for _, _, name, value in entries:
        sbp = _sbp_for(name, value, placement, patterns)
        other = first.setdefault(id(value), (name, sbp))
        if other[1] != sbp:
            raise ValueError(
                f"parallelize: {other[0]!r} and {name!r} are one tensor (tied), and the plan "
                f"gives it {other[1]} and {sbp}. "
                "Give both names the same SBP."
            )
    for _, _, _, value in entries:
        if id(value) not in made:
            made[id(value)] = _made_global(value, placement, first[id(value)][1], check)
    for owner, key, _, value in entries:
        store: Any = owner._parameters if key in owner._parameters else owner._buffers
        store[key] = made[id(value)]
    return module


def _entries(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """(owner, key, full name, tensor) of every plain parameter and buffer."""
    found = []
    for prefix, owner in module.named_modules():
        for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
            if value is not None and not isinstance(value, GlobalTensor):
                found.append((owner, key, f"{prefix}.{key}" if prefix else key, value))
    return found


def _sbp_for(
    name: str, value: torch.Tensor, placement: Placement, patterns: Mapping[str, SbpLike]
) -> NdSbp:
    for pattern, sbp in patterns.items():
        if fnmatch.fnmatchcase(name, pattern):
            try:
                return resolve_sbp(sbp, placement, value.shape)
            except ValueError as error:
                raise ValueError(
                    f"parallelize: pattern {pattern!r} for {name!r}: {error}"
                ) from None
    return (B,) * placement.ndim


def _made_global(
    value: torch.Tensor, placement: Placement, sbp: NdSbp, check: bool
) -> torch.Tensor:
    made = distribute(value.detach(), placement, sbp, check=check)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made
