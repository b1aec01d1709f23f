"""Ops over lists of tensors: ``torch._foreach_*`` and the fused optimizer steps.

A *position* is an index i: the i-th tensors of all lists belong together, such as a parameter, its
gradient and its state, and most of these ops are elementwise in them. If all tensors at each
position share one layout, the op runs on lists of shards in one call. Otherwise the op on single
tensors is called for each position. Positions may be on different placements, or hold plain
tensors: this rank computes the positions of which it has shards, and runs the others on ``meta``
tensors.

A *factor* is a tensor that applies to all positions. Each rank needs its value, so it is boxed to
B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....movement.boxed import box
from ....movement.world import my_coordinate, whole_on_world
from ....spec import B, Placement, TensorSpec
from ....spec.nested import map_tensors
from ...plans.plan import FAST, OtherCall, Plan, list_ops
from ...plans.shards import HookOff, attach, is_global, plain, rebox
from ...running.moved_views import any_moved
from ...running.on_lists import OnLists
from ..functions.torch_functions import TorchFunction
from . import list_norms, scaled_gradients
from .fused_steps import fused_step

_Tensor = torch.Tensor

# Ops that are not elementwise in the tensors at a position (index of the lists), with their own
# implementations.
_OWN_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": list_norms.norm,
    "_amp_foreach_non_finite_check_and_unscale_": scaled_gradients.unscale,
}
_BY_POSITION = frozenset(("_foreach_max", "_foreach_mm", "_foreach_powsum"))
# Ops for which torch takes a tensor as the factor of all positions; others read a number from it.
_TAKE_A_TENSOR = frozenset("_foreach_add _foreach_mul _foreach_div".split())
# Op on single tensors, where its name is not that of the foreach op without "_foreach_".
_SINGLE_OPS: dict[str, Callable[..., Any]] = {
    "maximum": _Tensor.clamp_min,
    "maximum_": _Tensor.clamp_min_,
    "minimum": _Tensor.clamp_max,
    "minimum_": _Tensor.clamp_max_,
    "pow": torch.pow,
    "powsum": list_norms.powsum,
}


def plan_list_op(function: TorchFunction, args: tuple, kwargs: dict) -> Plan | None:
    """Make the plan of an op over lists of tensors, such as ``torch._foreach_add``.

    Returns None if no list of tensors is passed.
    """
    lists = _tensor_lists(args, kwargs)
    if not lists:
        return None
    name = function.name + ("_" if function.inplace else "")
    if name in _OWN_IMPLEMENTATIONS:
        return OtherCall(name, _OWN_IMPLEMENTATIONS[name])
    if function.name.startswith("_fused_"):
        return _plan_fused(function, lists, args, kwargs)
    _check_lengths(lists, args, kwargs)
    layouts = [_common_spec([x[i] for x in lists]) for i in range(len(lists[0]))]
    if not _can_take_factors(function.name, layouts, _factors(args, kwargs)):
        return OtherCall(function.name, _replace_factors(function, layouts))
    if function.name in _BY_POSITION or any(layout is None for layout in layouts):
        return OtherCall(function.name, _one_by_one(function))
    return _plan_on_shards(function, layouts)


def _plan_on_shards(function: TorchFunction, layouts: Sequence[Any]) -> Plan:
    """Return the plan that runs the op on lists of shards, for positions that each have one layout.

    If this rank lacks the shards of some positions, or some are plain, the plan calls the op in two
    groups, see ``_call_in_groups``.
    """
    if not all(map(_is_held, layouts)):
        return OtherCall(function.name, _call_in_groups(function, layouts))
    plan = OnLists(function.name)
    plan.function, plan.way = function.run, FAST
    plan.inplace, plan.outs = function.inplace, tuple(layouts)
    if plan.inplace:
        # For moved views (views that boxing has copied): the op on lists would write into the
        # copies only, not into their sources.
        plan.one_by_one = _one_by_one(function)
    return plan


def _is_held(layout: TensorSpec | _Plain | None) -> bool:
    """Return whether this rank holds shards of the tensors at one position of the lists.

    ``layout`` is that of the tensors (see ``_common_spec``). Plain tensors do not count.
    """
    return isinstance(layout, TensorSpec) and my_coordinate(layout.placement) is not None


def _plan_fused(
    function: TorchFunction, lists: list[Sequence[Any]], args: tuple, kwargs: dict
) -> Plan:
    """Return the plan of a fused optimizer step, on shards where layouts allow, else on copies.

    The shards are used directly if at each position all tensors have one layout, this rank has
    their shards, and no factor is a global tensor.
    """
    layouts = [_common_spec([x[i] for x in lists if i < len(x)]) for i in range(len(lists[0]))]
    if not all(map(_is_held, layouts)) or any(map(is_global, _factors(args, kwargs))):
        return OtherCall(function.name, fused_step(function.run))
    plan = OnLists(function.name)
    plan.function, plan.way, plan.inplace = function.run, FAST, True
    return plan


# -- arguments -------------------------------------------------------------------------------------


def _tensor_lists(args: tuple, kwargs: dict) -> list[Sequence[Any]]:
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list)]
    return [a for a in lists if any(isinstance(x, _Tensor) for x in a)]


def _factors(args: tuple, kwargs: dict) -> list[Any]:
    """Return the tensors that are passed on their own, not in a list: one for all positions."""
    return [a for a in (*args, *kwargs.values()) if isinstance(a, _Tensor)]


def _check_lengths(lists: list[Sequence[Any]], args: tuple, kwargs: dict) -> None:
    """Check the lengths of the lists as torch does, with torch's message."""
    count = len(lists[0])
    for items in (a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list)):
        if len(items) != count:
            what = "tensors" if any(items is x for x in lists) else "numbers"
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {count} and {len(items)} "
                f"{what}"
            )


class _Plain:
    """Marker that stands for the layout of a position at which all tensors are plain."""


_PLAIN = _Plain()


def _common_spec(tensors: Sequence[Any]) -> TensorSpec | _Plain | None:
    """Return the spec shared by the tensors at one index of the lists, or None if none fits.

    The op would run on their shards, so the spec must not be partial. A 0-d tensor after the first
    may be B, or plain, whatever the spec of the others. If all tensors are plain, the marker
    ``_PLAIN`` is returned.
    """
    if not any(map(is_global, tensors)):
        return _PLAIN
    if not is_global(tensors[0]):
        return None
    spec: TensorSpec = tensors[0]._spec
    if any(entry.is_partial for entry in spec.sbp):
        return None
    return spec if all(_has_layout_of(t, spec) for t in tensors[1:]) else None


def _has_layout_of(t: Any, spec: TensorSpec) -> bool:
    """Return whether the op may run on the shard of ``t`` and shards of tensors with ``spec``."""
    if not is_global(t):
        return t.ndim == 0
    own_spec: TensorSpec = t._spec
    if own_spec is spec:
        return True
    if own_spec.placement != spec.placement:
        return False
    same_layout = (own_spec.sbp, own_spec.shape) == (spec.sbp, spec.shape)
    return same_layout or (own_spec.ndim == 0 and all(entry is B for entry in own_spec.sbp))


def _can_take_factors(name: str, layouts: Sequence[Any], factors: Sequence[Any]) -> bool:
    """Return whether the op can take its factors (tensors that apply to all positions) as they are.

    Plain factors always fit. A global one fits if it is B, the op takes a tensor as factor, and all
    specs in ``layouts`` are on its placement. ``layouts`` are the results of ``_common_spec`` for
    the positions; none may be ``_PLAIN``.
    """
    placements = {spec.placement for spec in layouts if isinstance(spec, TensorSpec)}
    return all(
        not is_global(x)
        or (
            name in _TAKE_A_TENSOR
            and placements == {x.placement}
            and _PLAIN not in layouts
            and all(entry is B for entry in x.sbp)
        )
        for x in factors
    )


# -- running ---------------------------------------------------------------------------------------


def _replace_factors(function: TorchFunction, layouts: Sequence[Any]) -> Callable[..., Any]:
    """Make a function that replaces each global factor by its value and calls ``function`` again.

    A factor is a tensor that applies to all positions of the lists. The value is a B tensor or a
    plain tensor (see ``_factor_value``), or a list of numbers where torch reads numbers. The second
    call is dispatched like any other. ``layouts`` are those of the positions.
    """
    placements = {spec.placement for spec in layouts if isinstance(spec, TensorSpec)}
    placement = placements.pop() if len(placements) == 1 and _PLAIN not in layouts else None

    def value(x: Any) -> Any:
        if not is_global(x):
            return x
        if function.name in _TAKE_A_TENSOR:
            return _factor_value(x, placement)
        return x.tolist()  # torch reads numbers here, one for all or one per position

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {key: value(x) for key, x in kwargs.items()}
        return function.run(*map(value, args), **named)

    return call


def _factor_value(x: Any, placement: Placement | None) -> Any:
    """Return the value of the factor ``x`` as a tensor that does not have to be boxed again.

    If ``placement``, that of the list's tensors, is the one of ``x``, it is a B tensor on it;
    otherwise a plain tensor, equal on all ranks. An ``x`` that requires grad stays global.
    """
    spec: TensorSpec = x._spec
    if placement == spec.placement or x.requires_grad:
        return rebox(x, spec.with_sbp((B,) * spec.placement.ndim), "factor of a list")
    return plain(box(x, spec, whole_on_world(spec)))


def _call_in_groups(function: TorchFunction, layouts: Sequence[Any]) -> Callable[..., Any]:
    """Make a function that calls the op on the positions that this rank holds, then on the others.

    At the first positions this rank has shards or plain tensors. At the others it is outside of the
    placement and has ``meta`` tensors. In-place ops skip those, because not every kernel supports
    ``meta``. ``layouts`` are those of the positions.
    """
    count = len(layouts)
    follows = [spec is not _PLAIN and my_coordinate(spec.placement) is None for spec in layouts]
    inside = [i for i in range(count) if not follows[i]]
    outside = [i for i in range(count) if follows[i]]

    def call(*args: Any, **kwargs: Any) -> Any:
        if function.inplace and any_moved(args, kwargs):
            return _one_by_one(function)(*args, **kwargs)
        if function.inplace:
            # Not run on meta tensors, but recorders and autograd must see that it writes.
            written = [plain(args[0][i]) for i in outside if not args[0][i].is_inference()]
            torch.autograd.graph.increment_version(written)
        outs: list[Any] = [None] * count
        for positions in (inside,) if function.inplace else (inside, outside):
            if positions:
                positional, named = (
                    _pick_arguments(arguments, positions, count) for arguments in (args, kwargs)
                )
                if positions is outside:
                    # Meta kernels written in Python would read the device of a global tensor.
                    positional, named = map_tensors((positional, named), plain)
                with HookOff():
                    results = function.run(*positional, **named)
                # In-place foreach ops may return None.
                for i, result in zip(positions, results or (), strict=not function.inplace):
                    outs[i] = result
        if function.inplace:
            return args[0]
        return tuple(map(_attach_layout, outs, layouts))

    return call


def _attach_layout(x: torch.Tensor, layout: Any) -> Any:
    return x if layout is _PLAIN else attach(x, layout.with_dtype(x.dtype))


def _pick_arguments(arguments: Any, positions: list[int], count: int) -> Any:
    if isinstance(arguments, dict):
        return {name: _pick_items(value, positions, count) for name, value in arguments.items()}
    return tuple(_pick_items(value, positions, count) for value in arguments)


def _pick_items(value: Any, positions: list[int], count: int) -> Any:
    """Return the items of the list ``value`` at ``positions``.

    An argument that is no list with ``count`` items, one per position, is returned as it is.
    """
    if not isinstance(value, tuple | list) or len(value) != count:
        return value
    return [value[i] for i in positions]


def _one_by_one(function: TorchFunction) -> Callable[..., Any]:
    """Return a function that runs a foreach op as single ops, one for each position of the lists.

    ``torch._foreach_add(xs, ys)`` becomes ``[x.add(y) for x, y in zip(xs, ys)]``, each dispatched
    by itself.
    """
    name = function.name.removeprefix("_foreach_") + ("_" if function.inplace else "")
    single = _SINGLE_OPS.get(name) or getattr(_Tensor, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        count = len(_tensor_lists(args, kwargs)[0])

        def item_at(i: int, value: Any) -> Any:
            return value[i] if isinstance(value, tuple | list) else value

        outs = [
            single(
                *(item_at(i, a) for a in _args_of_single(name, args)),
                **_kwargs_of_single(name, args, kwargs, i, item_at),
            )
            for i in range(count)
        ]
        return args[0] if function.inplace else tuple(outs)

    return call


def _args_of_single(name: str, args: tuple) -> tuple:
    # addcmul and addcdiv take their factor by keyword when they work on single tensors.
    return args[:3] if name.startswith("addc") else args


def _kwargs_of_single(
    name: str, args: tuple, kwargs: dict, i: int, item_at: Callable[[int, Any], Any]
) -> dict:
    numbers = {key: item_at(i, value) for key, value in kwargs.items() if key != "scalars"}
    if not name.startswith("addc"):
        return numbers | ({"other": item_at(i, kwargs["scalars"])} if "scalars" in kwargs else {})
    factor = kwargs.get("scalars", args[3] if len(args) > 3 else None)
    if isinstance(factor, _Tensor):  # one per position, which torch reads as numbers
        factor = factor.tolist()
    return numbers | ({} if factor is None else {"value": item_at(i, factor)})


list_ops["_foreach_"] = list_ops["_fused_"] = list_ops["_amp_foreach_"] = plan_list_op
