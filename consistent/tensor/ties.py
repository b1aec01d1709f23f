"""Views whose data boxing moved.

On one device a view shares storage with its source. One that was moved is a copy, tied to its
source: read after the source was written, it is taken again; written into, it raises.
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import collect, replace
from .shards import HookOff, is_global

# As many entries as there are ties: the hook looks for tied operands while it is not empty.
alive: list[None] = []

VIEWS = frozenset(
    "getitem select narrow view reshape view_as transpose t permute movedim moveaxis swapaxes "
    "swapdims squeeze "
    "unsqueeze expand expand_as split chunk split_with_sizes tensor_split unbind diagonal flatten "
    "unflatten "
    "unfold real imag".split()
)
# Whether these give a view depends on strides, which a logical tensor has none of: taken as views
# where they are written into, and as copies where they are read.
_AT_TIMES = frozenset(("reshape", "flatten"))


class Tie:
    """How a view is taken from its source, and what the source was like when it last was."""

    __slots__ = ("_given", "_graded", "_index", "_run", "_seen", "_value")

    def __init__(self, run: Any, given: tuple, index: int | None) -> None:
        self._run, self._given, self._index = run, given, index
        self._graded, self._value = torch.is_grad_enabled(), None
        self._seen = self._source()
        alive.append(None)

    def __del__(self) -> None:
        alive.pop()

    def fresh(self, x: Any) -> Any:
        """The view ``x`` as its source is now."""
        source, version = self._source()
        if source is not self._seen[0] or version != self._seen[1]:
            tensors: list[Any] = []
            collect(self._given, tensors)
            args, kwargs = replace(self._given, iter([source, *tensors[1:]]))
            with torch.set_grad_enabled(self._graded):
                made = self._run(*args, **kwargs)
            self._value = made if self._index is None else made[self._index]
            self._seen = source, version
        return x if self._value is None else self._value

    def _source(self) -> tuple[Any, int]:
        tensors: list[Any] = []
        collect(self._given, tensors)
        source = fresh(tensors[0])
        with HookOff():
            return source, source._version


def fresh(x: Any) -> Any:
    """``x``, or the same view of what its source holds by now."""
    tie = x._moved_view
    return tie.fresh(x) if tie.__class__ is Tie else x


def freshened(args: tuple, kwargs: dict) -> tuple | None:
    """(args, kwargs) with fresh tensors; None if they are."""
    given: list[Any] = []
    collect((args, kwargs), given)
    new = [fresh(x) if is_global(x) else x for x in given]
    if all(a is b for a, b in zip(new, given, strict=True)):
        return None
    return replace((args, kwargs), iter(new))


def is_view(plan: Any) -> bool:
    """Whether the op's result would share storage with its input on one device."""
    if plan.name != "getitem":
        return plan.name in VIEWS
    # Tensors and lists of numbers as an index make a copy, in torch as here.
    index = plan.call.args[1] if plan.call.args[1].__class__ is tuple else (plan.call.args[1],)
    return len(plan.call.operands) == 1 and not any(isinstance(part, list | bool) for part in index)


def tie(out: Any, plan: Any, source: Any, args: tuple, kwargs: dict) -> None:
    """Tie the views ``out``, which the call of ``plan`` has moved, to ``source``."""
    with HookOff():
        tracked = plan.name not in _AT_TIMES and not source.is_inference()
    several = isinstance(out, tuple | list)
    for index, view in enumerate(out if several else (out,)):
        given = args, kwargs
        view._moved_view = Tie(plan.run, given, index if several else None) if tracked else True


def moved_view_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}_: this tensor is a view on one device, but boxing had to move its data, so what "
        "is written here would "
        "not reach the tensor it was taken from. Write into that tensor instead: x[index] = value."
    )
