"""Rewrites of a call into other calls, for calls that the rule table does not cover as they are.

They serve arguments of operators that are passed by keyword, tensors passed where torch reads a
number, in-place ops that change a tensor's shape, and functions for which another sequence of calls
is cheaper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...plans.shards import HookOff, plain
from .bags import embedding_bag

_Tensor = torch.Tensor

# Torch function -> replacement, which returns NotImplemented for calls that torch's own Python
# body should handle.
REWRITES: dict[Any, Callable[..., Any]] = {torch.nn.functional.embedding_bag: embedding_bag}


def first_supported(
    first: Callable[..., Any] | None, otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a function that calls ``first``, or ``otherwise`` if that returns ``NotImplemented``."""
    if first is None:
        return otherwise

    def run(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return otherwise(*args, **kwargs) if result is NotImplemented else result

    return run


def reshape_in_place(name: str) -> Callable[..., Any]:
    """Return an implementation of an op such as ``x.t_()`` or ``x.unsqueeze_(0)``.

    It computes the view that the op ``name`` (``t``, without the underscore) returns, and gives the
    object ``x`` the data and the spec of this view. It raises if ``x`` requires grad.
    """

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.requires_grad:
            raise RuntimeError(
                f"{name}_: it changes the shape of {x._spec}, which requires grad, and the "
                "history of a global tensor "
                f"keeps its shape. Use x.{name}(...), which returns a new tensor."
            )
        view = getattr(_Tensor, name)(x, *args, **kwargs)
        with HookOff():
            # The caller keeps the object ``x``, so its data is replaced rather than the view
            # returned.
            _Tensor.data.__set__(x, plain(view))  # type: ignore[attr-defined]
        x._spec = view._spec
        return x

    return run


# Op -> torch's keyword names of its first arguments, for ops where that is not just "input".
_FIRST_NAMES = {
    "where": ("condition",),
    "searchsorted": ("sorted_sequence",),
    "polygamma": ("n",),
    "special_polygamma": ("n",),
    "affine_grid_generator": ("theta",),
    "take_along_dim": ("input", "indices"),
    "randint_like": ("input", "high"),
}


def first_by_position(
    name: str, run: Callable[..., Any], args: tuple, kwargs: dict
) -> Callable[..., Any] | None:
    """Return ``run`` wrapped to pass its first arguments by position, or None if they are already.

    ``run(other=b, input=a)`` becomes ``run(a, other=b)``. Rules and in-place ops read the target
    and the sizes from the first position, but callers may pass them by keyword. ``name`` is the
    name of the op that ``run`` computes.
    """
    lists = name.startswith(("_foreach_", "_fused_"))
    names = _FIRST_NAMES.get(name, ("self",) if lists else ("input",))[len(args) :]
    if name == "randint_like" and "low" in kwargs:
        names = names[:-1]  # `low` comes between input and high, so `high` stays a keyword
    if not names or not all(each in kwargs for each in names):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, *(kwargs.pop(each) for each in names), **kwargs)

    return call


def as_leaf(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory such as ``zeros_like`` for calls with ``requires_grad=True``.

    Passed on to torch, the flag would make the local shard a leaf, whose gradient would not be
    boxed. So ``run`` is called without the flag, which is then set on the global tensor that it
    returns.
    """

    def call(*args: Any, requires_grad: bool, **kwargs: Any) -> Any:
        return run(*args, **kwargs).requires_grad_(requires_grad)

    return call


def as_overload(run: Any, args: tuple, kwargs: dict) -> Callable[..., Any] | None:
    """Return a function that calls an overload of the operator ``run`` with arguments by position.

    It turns ``torch.ops.aten.sum(self=x, dim=[0])`` into ``torch.ops.aten.sum.dim_IntList(x,
    [0])``: the overload that torch selects for these arguments, with arguments passed by position
    where possible, and True for a 1 that torch reads as a bool. Returns None if the call has this
    form already, or if torch refuses it.

    Rows name parameters as torch's Python functions do, and tell overloads apart by their
    arguments. Operators have other names for some parameters, at the same positions, and
    ``aten.var(x, 1)`` is ``unbiased=True``, whereas ``torch.var(x, 1)`` reduces along a dim.
    """
    overload = (
        run if isinstance(run, torch._ops.OpOverload) else _select_overload(run, args, kwargs)
    )
    if overload is None:
        return None
    parameters = [a for a in overload._schema.arguments if not a.kwarg_only]
    bool_positions = {i for i, a in enumerate(parameters) if str(a.type) == "bool"}
    named = parameters[len(args) :]
    # Parameters after the last one that is passed keep their defaults.
    while named and named[-1].name not in kwargs:
        named.pop()
    if any(a.name not in kwargs and not a.has_default_value() for a in named):
        return None
    if not named and all(args[i].__class__ is bool for i in bool_positions if i < len(args)):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *(kwargs.pop(a.name, a.default_value) for a in named)]
        converted = (bool(x) if i in bool_positions else x for i, x in enumerate(values))
        return overload(*converted, **kwargs)

    return call


def _select_overload(packet: Any, args: tuple, kwargs: dict) -> Any:
    """Return the overload of the operator ``packet`` that torch selects for these arguments.

    For ``torch.ops.aten.sum`` and ``(x, [0])`` it is ``aten.sum.dim_IntList``. Returns None if
    torch finds none.
    """
    try:
        with HookOff():
            name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, name)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The parameters of an op that must be numbers, for which a caller may pass a tensor.

    An example is ``repeats`` of ``x.repeat(n)``: torch reads the value of a tensor ``n`` there.
    Parameters that some overload of the op accepts as a tensor are not included.
    """

    places: frozenset[int]
    rest: int | None  # from this position on the arguments are sizes, maybe passed one by one
    names: frozenset[str]
    tensors: frozenset[int | str]  # parameters that are tensors

    def holds(self, place: int | str) -> bool:
        """Return whether the parameter at ``place``, a position or a name, must be a number."""
        if place.__class__ is str:
            return place in self.names
        return place in self.places or (self.rest is not None and place >= self.rest)  # type: ignore[operator]


def numbers_passed_as_tensors(name: str, args: tuple, kwargs: dict) -> Numbers | None:
    """Return the op's ``Numbers`` if this call passes a tensor for one of them, else None.

    The planner then wraps the op with ``with_numbers``. ``name`` is the op's name.
    """
    numbers = number_parameters(name)
    tensor_places = [
        place for place, value in (*enumerate(args), *kwargs.items()) if _has_tensor(value)
    ]
    if not any(map(numbers.holds, tensor_places)):
        return None
    if numbers.tensors and not numbers.tensors.intersection(tensor_places):
        return None  # x.polygamma(n), whose arguments are in another order than the schema's
    return numbers


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(item, _Tensor) for item in value)
    return isinstance(value, _Tensor)


@functools.cache
def number_parameters(name: str) -> Numbers:
    """Return which parameters of the op ``name`` are numbers, according to its schemas in torch."""
    tensors: set[int | str] = set()
    numbers: set[int | str] = set()
    rest = None
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        for place, parameter in enumerate(schema.arguments):
            kind = str(parameter.type)
            into = tensors if "Tensor" in kind else numbers
            into.update((parameter.name,) if parameter.kwarg_only else (place, parameter.name))
            if kind in ("List[int]", "List[SymInt]") and place == 1 == _last_place(schema):
                rest = place
    # If some overload takes a tensor there, torch reads no number from it.
    number_only = numbers - tensors
    places = frozenset(x for x in number_only if isinstance(x, int))
    names = frozenset(x for x in number_only if isinstance(x, str))
    return Numbers(places, rest if 1 in number_only else None, names, frozenset(tensors))


def _last_place(schema: Any) -> int:
    return sum(not parameter.kwarg_only for parameter in schema.arguments) - 1


def with_numbers(run: Callable[..., Any], numbers: Numbers) -> Callable[..., Any]:
    """Wrap ``run`` to replace each tensor that is passed for a number by its value.

    ``numbers`` says for which parameters this is done. Reading a value (``x.item()``) is a
    collective.
    """

    def read(value: Any) -> Any:
        if isinstance(value, _Tensor):
            return value.item()
        return type(value)(map(read, value)) if isinstance(value, tuple | list) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(read(x) if numbers.holds(i) else x for i, x in enumerate(args))
        named = {name: read(x) if numbers.holds(name) else x for name, x in kwargs.items()}
        return run(*args, **named)

    return call
