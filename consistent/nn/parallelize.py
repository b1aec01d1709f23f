"""parallelize: turn an ordinary module's parameters and buffers into global tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..spec import B, NdSbp, Placement, SbpLike, Split, as_nd_sbp, resolve_sbp
from ..tensor.global_tensor import GlobalTensor
from ..tensor.making.create import distribute
from ..tensor.making.scope import chosen

_ALL_ELSE = "*"


class _Slot(NamedTuple):
    """A place in a module that holds a tensor; a tied tensor is in several."""

    owner: torch.nn.Module
    key: str
    name: str
    value: torch.Tensor


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
            counts; names that no pattern matches are B (data parallel). A tied tensor matches by
            any of its names, and ``"*"`` applies where no other pattern matches. 0-d tensors that a
            pattern with wildcards would split are B.
        check: verify that the values are equal on all ranks. A collective per tensor.

    Returns:
        ``module``.

    Raises:
        ValueError: a pattern matches nothing, an SBP does not fit the tensor it is for, or a lazy
            module has not seen its first input.
    """
    placement, _ = chosen("parallelize", placement, B)
    patterns = dict(plan or {})
    slots = _slots(module)
    _check_names(module, slots, patterns)
    tensors: dict[int, list[_Slot]] = {}
    for slot in slots:
        tensors.setdefault(id(slot.value), []).append(slot)
    sbps = {key: _sbp_of(places, placement, patterns) for key, places in tensors.items()}
    # All are made before any is put in place, so that an error leaves the module as it was.
    made = {
        key: _made_global(places[0].value, placement, sbps[key], check)
        for key, places in tensors.items()
    }
    for owner, key, _, value in slots:
        store: Any = owner._parameters if key in owner._parameters else owner._buffers
        store[key] = made[id(value)]
    return module


def _slots(module: torch.nn.Module) -> list[_Slot]:
    """The places of plain parameters and buffers, under every name that leads there."""
    found = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
            name = f"{prefix}.{key}" if prefix else key
            if value is None or isinstance(value, GlobalTensor):
                continue
            if is_lazy(value):
                raise ValueError(
                    f"parallelize: {name!r} has no shape yet, for {type(owner).__name__} takes its "
                    "sizes from its first input. Show it one first, on every rank with the same "
                    "seed: module(sample), and then call parallelize."
                )
            found.append(_Slot(owner, key, name, value))
    return found


def _check_names(
    module: torch.nn.Module, slots: Sequence[_Slot], patterns: Mapping[str, SbpLike]
) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(slot.name, pattern) for slot in slots):
            names = ", ".join(sorted({slot.name for slot in slots})[:8])
            raise ValueError(
                f"parallelize: pattern {pattern!r} matches no parameter or buffer of "
                f"{type(module).__name__}. "
                f"Names are such as {names}; list them with "
                "module.named_parameters(remove_duplicate=False)."
            )


def _sbp_of(
    places: Sequence[_Slot], placement: Placement, patterns: Mapping[str, SbpLike]
) -> NdSbp:
    """The SBP that the plan gives a tensor by any of its names."""
    named = [(slot, _pattern_for(slot.name, patterns)) for slot in places]
    said = [(slot, pattern) for slot, pattern in named if pattern not in (None, _ALL_ELSE)]
    said = said or [(slot, pattern) for slot, pattern in named if pattern is not None]
    given = [(slot.name, _resolved(slot, p, patterns[p], placement)) for slot, p in said if p]
    for name, sbp in given:
        if sbp != given[0][1]:
            raise ValueError(
                f"parallelize: {given[0][0]!r} and {name!r} are one tensor (tied), and the plan "
                f"gives it {given[0][1]} and {sbp}. Give both names the same SBP, or one of them "
                "only."
            )
    return given[0][1] if given else (B,) * placement.ndim


def _pattern_for(name: str, patterns: Mapping[str, SbpLike]) -> str | None:
    return next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)


def _resolved(slot: _Slot, pattern: str, sbp: SbpLike, placement: Placement) -> NdSbp:
    try:
        if slot.value.ndim == 0 and pattern != slot.name:  # such as a counter among weights
            sbp = tuple(B if isinstance(entry, Split) else entry for entry in as_nd_sbp(sbp))
        return resolve_sbp(sbp, placement, slot.value.shape)
    except ValueError as error:
        raise ValueError(f"parallelize: pattern {pattern!r} for {slot.name!r}: {error}") from None


def _made_global(
    value: torch.Tensor, placement: Placement, sbp: NdSbp, check: bool
) -> torch.Tensor:
    made = distribute(value.detach(), placement, sbp, check=check)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made
