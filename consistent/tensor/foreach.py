"""Ops over lists of tensors: ``torch._foreach_*`` and the fused optimizer steps.

Position i of every list belongs together, and each op is elementwise in it. Where all tensors at a
position lie alike the whole list runs on the shards in one call; otherwise position by position.
Positions may lie on different placements: this rank has work at those that it holds, and follows
the others on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..boxing.differentiable import box, max_over, sum_over
from ..boxing.run import everywhere, here
from ..spec import B, Placement, TensorSpec
from .naming import Known
from .plan import Plan, list_ops
from .shards import HookOff, adopt, attach, is_global, plain, rebox


def plan_list_op(known: Known, args: tuple, kwargs: dict) -> Plan:
    """The plan of a list op for tensors that lie as these do."""
    if known.name == "_foreach_norm":
        return Plan("handler", known.name, norm)
    positions = _positions(args, kwargs)
    outs = [_common(tensors) for tensors in positions]
    if all(spec is not None for spec in outs):
        plan = Plan("list", known.name, known.run)
        plan.inplace = known.inplace or known.name.startswith("_fused_")
        plan.outs = tuple(spec for spec in outs if spec is not None)
        outside = [i for i, spec in enumerate(plan.outs) if here(spec.placement) is None]
        plan.fast = not outside
        if outside:
            plan.run = _apart(known, outside, len(outs))
        return plan
    if known.name.startswith("_fused_"):
        return Plan("handler", known.name, _aligned(known.run))
    return Plan("handler", known.name, _one_by_one(known))


def _lists(args: tuple, kwargs: dict) -> list[Sequence[Any]]:
    found = [a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list)]
    return [a for a in found if any(isinstance(x, torch.Tensor) for x in a)]


def _positions(args: tuple, kwargs: dict) -> list[list[torch.Tensor]]:
    """The tensors that belong together; plain 0-d ones, such as step counts, go with anything."""
    lists = _lists(args, kwargs)
    count = max(map(len, lists))
    return [
        [x[i] for x in lists if i < len(x) and (is_global(x[i]) or x[i].ndim > 0)]
        for i in range(count)
    ]


def _common(tensors: Sequence[Any]) -> TensorSpec | None:
    """The layout that all ``tensors`` share, if they do and it is not partial."""
    if not tensors or not all(map(is_global, tensors)):
        return None
    spec: TensorSpec = tensors[0]._spec
    if any(entry.is_partial for entry in spec.sbp):
        return None
    for t in tensors[1:]:
        other = t._spec
        if other is not spec and (other.placement, other.sbp, other.shape) != (
            spec.placement, spec.sbp, spec.shape,
        ):  # fmt: skip
            return None
    return spec


def _apart(known: Known, outside: list[int], count: int) -> Callable[..., Any]:
    """The op on the positions that this rank holds, and by itself on those that it follows.

    Steps and other writes into ``meta`` shards are left out: not every kernel knows ``meta``.
    """
    inside = [i for i in range(count) if i not in outside]

    def call(*args: Any, **kwargs: Any) -> Any:
        outs: list[Any] = [None] * count
        for positions in (inside,) if known.inplace else (inside, outside):
            if positions:
                some = {name: _pick(value, positions, count) for name, value in kwargs.items()}
                made = known.run(*(_pick(value, positions, count) for value in args), **some)
                for i, one in zip(positions, made or (), strict=not known.inplace):
                    outs[i] = one
        return None if known.inplace else outs

    return call


def _pick(value: Any, positions: list[int], count: int) -> Any:
    if not isinstance(value, tuple | list) or len(value) != count:
        return value
    return [value[i] for i in positions]


def _one_by_one(known: Known) -> Callable[..., Any]:
    """Run the op that works on single tensors, through the hook, at each position."""
    name = known.name.removeprefix("_foreach_") + ("_" if known.inplace else "")

    def call(*args: Any, **kwargs: Any) -> Any:
        count = len(args[0])

        def at(i: int, value: Any) -> Any:
            return value[i] if isinstance(value, tuple | list) else value

        single = getattr(torch.Tensor, name)
        outs = [
            single(
                *(at(i, a) for a in _single_args(name, args)),
                **_single_kwargs(name, args, kwargs, i, at),
            )
            for i in range(count)
        ]
        return None if known.inplace else outs

    return call


def _single_args(name: str, args: tuple) -> tuple:
    # addcmul and addcdiv take their factor by keyword when they work on single tensors.
    return args[:3] if name.startswith("addc") else args


def _single_kwargs(
    name: str, args: tuple, kwargs: dict, i: int, at: Callable[[int, Any], Any]
) -> dict:
    made = {key: at(i, value) for key, value in kwargs.items()}
    if name.startswith("addc") and len(args) > 3:
        made["value"] = at(i, args[3])
    if name.startswith("addc") and "scalars" in made:
        made["value"] = made.pop("scalars")
    return made


def _aligned(run: Callable[..., Any]) -> Callable[..., Any]:
    """A fused step with every tensor boxed to where the first at its position lies."""

    def call(*args: Any, **kwargs: Any) -> Any:
        targets = [t._spec for t in args[0]]

        def align(value: Any) -> Any:
            if not isinstance(value, tuple | list):
                return value
            return (
                [_lay(x, spec) for x, spec in zip(value, targets, strict=True)] if value else value
            )

        with HookOff():
            return run(*map(align, args), **{key: align(value) for key, value in kwargs.items()})

    return call


def _lay(x: Any, spec: TensorSpec) -> Any:
    if not isinstance(x, torch.Tensor) or (x.__class__ is torch.Tensor and x.ndim == 0):
        return x
    given = adopt(x, spec.placement, "fused step")
    target = TensorSpec.of(spec.placement, spec.sbp, given.shape, given.dtype)
    return given if given._spec is target else rebox(given, target, "fused step")


def norm(tensors: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:  # noqa: A002
    """``torch._foreach_norm``: norms of the logical tensors, with one reduction per way of lying.

    Each is a 0-d B tensor. Of tensors on different placements they are needed in one place, as for
    the norm of them all that clipping multiplies each with: plain tensors, alike on every rank of
    the world.
    """
    whole = [_settled(t) for t in tensors]
    groups: dict[tuple[Placement, tuple[int, ...]], list[int]] = {}
    for i, t in enumerate(whole):
        axes = tuple(a for a, e in enumerate(t._spec.sbp) if e.is_split)
        groups.setdefault((t._spec.placement, axes), []).append(i)
    outs: list[Any] = [None] * len(whole)
    apart = len({placement for placement, _ in groups}) > 1
    for (placement, axes), members in groups.items():
        local = _local_norms([plain(whole[i]) for i in members], ord, dtype)
        value = _combined(local, placement, axes, ord)
        spec = TensorSpec.of(placement, (B,) * placement.ndim, value.shape, value.dtype)
        if apart:
            value, spec = box(value, spec, everywhere(spec)), everywhere(spec)
        scalar = TensorSpec.of(spec.placement, spec.sbp, (), value.dtype)
        for i, one in zip(members, value.unbind(0), strict=True):
            # The gradient of a plain tensor would count once for each rank.
            outs[i] = one if apart and not one.requires_grad else attach(one, scalar)
    return outs


def _settled(t: Any) -> Any:
    if not any(e.is_partial for e in t._spec.sbp):
        return t
    return rebox(t, t._spec.with_sbp(tuple(B if e.is_partial else e for e in t._spec.sbp)), "norm")


def _local_norms(shards: list[torch.Tensor], ord: float, dtype: torch.dtype | None) -> torch.Tensor:
    # The norm of nothing is 0; torch has no inf-norm of it.
    full = [x if x.numel() else x.new_zeros(1) for x in shards]
    norms = torch._foreach_norm(full, ord, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(list(norms))


def _combined(
    local: torch.Tensor, placement: Placement, axes: tuple[int, ...], ord: float
) -> torch.Tensor:
    if not axes:
        return local
    if ord == float("inf"):
        return max_over(local, placement, axes)
    return sum_over(local**ord, placement, axes) ** (1 / ord)


list_ops["_foreach_"] = list_ops["_fused_"] = plan_list_op
