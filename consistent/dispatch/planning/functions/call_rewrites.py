"""Calls that are answered by other calls: arguments of operators by keyword, numbers given as
tensors, in-place ops that change a tensor's shape, and functions that cost less another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...plans.shards import HookOff, plain
from .bags import embedding_bag

_Tensor = torch.Tensor

# Function of torch's -> one that gives NotImplemented for the calls that its own body takes.
BY_OTHER_CALLS: dict[Any, Callable[..., Any]] = {torch.nn.functional.embedding_bag: embedding_bag}


def unless(first: Callable[..., Any] | None, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """``first``, and ``otherwise`` for the calls for which it gives ``NotImplemented``."""
    if first is None:
        return otherwise

    def run(*args: Any, **kwargs: Any) -> Any:
        made = first(*args, **kwargs)
        return otherwise(*args, **kwargs) if made is NotImplemented else made

    return run


def reshaped_in_place(name: str) -> Callable[..., Any]:
    """x.t_(), x.unsqueeze_(0), ...: ``x`` becomes its own view, spec and all."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.requires_grad:
            raise RuntimeError(
                f"{name}_: it changes the shape of {x._spec}, which requires grad, and the "
                "history of a global tensor "
                f"keeps its shape. Use x.{name}(...), which returns a new tensor."
            )
        view = getattr(_Tensor, name)(x, *args, **kwargs)
        with HookOff():
            _Tensor.data.__set__(x, plain(view))  # type: ignore[attr-defined]
        x._spec = view._spec
        return x

    return run


# The names that torch has for what comes first, where rows have others or it is not an operand.
_FIRST = {
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
    """The function ``run``, called ``name``, with what comes first by position, where it was given
    by keyword, in any order: it is what is written in place, and where sizes are taken from. None
    where it was given by position."""
    lists = name.startswith(("_foreach_", "_fused_"))
    names = _FIRST.get(name, ("self",) if lists else ("input",))[len(args) :]
    if name == "randint_like" and "low" in kwargs:
        names = names[:-1]  # it would stand between
    if not names or not all(each in kwargs for each in names):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, *(kwargs.pop(each) for each in names), **kwargs)

    return call


def as_leaf(run: Callable[..., Any]) -> Callable[..., Any]:
    """zeros_like(x, requires_grad=True), ...: torch would make a leaf of the shard, whose gradient
    nobody boxes."""

    def call(*args: Any, requires_grad: bool, **kwargs: Any) -> Any:
        return run(*args, **kwargs).requires_grad_(requires_grad)

    return call


def as_overload(run: Any, args: tuple, kwargs: dict) -> Callable[..., Any] | None:
    """``torch.ops.aten.sum(self=x, dim=[0])`` as ``torch.ops.aten.sum.dim_IntList(x, [0])``: the
    overload that torch takes for these arguments, with those by position that may be, and True for
    a 1 that torch reads so. None where they are so already, or where torch refuses the call.

    Rows name parameters as torch's Python functions do, and tell overloads apart by their
    arguments. Operators have other names for some, at the same places, and ``aten.var(x, 1)`` is
    ``unbiased=True``, where ``torch.var(x, 1)`` is along a dim.
    """
    overload = run if isinstance(run, torch._ops.OpOverload) else _overload(run, args, kwargs)
    if overload is None:
        return None
    places = [a for a in overload._schema.arguments if not a.kwarg_only]
    truths = {i for i, a in enumerate(places) if str(a.type) == "bool"}
    named = places[len(args) :]
    while named and named[-1].name not in kwargs:
        named.pop()
    if any(a.name not in kwargs and not a.has_default_value() for a in named):
        return None
    if not named and all(args[i].__class__ is bool for i in truths if i < len(args)):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs.pop(a.name, a.default_value) for a in named)]
        read = (bool(x) if i in truths else x for i, x in enumerate(given))
        return overload(*read, **kwargs)

    return call


def _overload(packet: Any, args: tuple, kwargs: dict) -> Any:
    """The overload of a packet that torch takes for these arguments; None where none fits."""
    try:
        with HookOff():
            name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, name)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The parameters of an op that no overload takes as a tensor: torch reads a number, or
    several, from a tensor that is given there."""

    places: frozenset[int]
    rest: int | None  # from here on the arguments are sizes, which may come one by one
    names: frozenset[str]
    tensors: frozenset[int | str]  # parameters that are tensors

    def holds(self, place: int | str) -> bool:
        """Whether the argument there, by its place or its name, is one of these."""
        if place.__class__ is str:
            return place in self.names
        return place in self.places or (self.rest is not None and place >= self.rest)  # type: ignore[operator]


def given_as_tensors(name: str, args: tuple, kwargs: dict) -> Numbers | None:
    """The number parameters of the op, where one of them was given a tensor."""
    numbers = number_parameters(name)
    given = [place for place, value in (*enumerate(args), *kwargs.items()) if _has_tensor(value)]
    if not any(map(numbers.holds, given)):
        return None
    if numbers.tensors and not numbers.tensors.intersection(given):
        return None  # x.polygamma(n), which takes them in another order than torch.polygamma(n, x)
    return numbers


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(item, _Tensor) for item in value)
    return isinstance(value, _Tensor)


@functools.cache
def number_parameters(name: str) -> Numbers:
    """The number parameters of the op, read from its schemas."""
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
    found = numbers - tensors
    places = frozenset(x for x in found if isinstance(x, int))
    names = frozenset(x for x in found if isinstance(x, str))
    return Numbers(places, rest if 1 in found else None, names, frozenset(tensors))


def _last_place(schema: Any) -> int:
    return sum(not parameter.kwarg_only for parameter in schema.arguments) - 1


def with_numbers(run: Callable[..., Any], numbers: Numbers) -> Callable[..., Any]:
    """The op, given the numbers that the tensors hold. Reading them is a collective."""

    def read(value: Any) -> Any:
        if isinstance(value, _Tensor):
            return value.item()
        return type(value)(map(read, value)) if isinstance(value, tuple | list) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(read(x) if numbers.holds(i) else x for i, x in enumerate(args))
        named = {name: read(x) if numbers.holds(name) else x for name, x in kwargs.items()}
        return run(*args, **named)

    return call
