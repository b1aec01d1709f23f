"""Plan: what is done for a call, and the tables that hold plans.

A plan is data that can run itself: it prints, and tests compare it. The hook (C++) reads from it
how it is run (``way``), what is called (``function``) and the specs or layouts of its outputs
(``outs``); the simple kinds are run there, the others by their ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from mirrored.transports.torch_dist import groups

from ...movement import plain_values
from ...spec import Layout, TensorSpec
from .. import _C

# How the hook runs a plan; the numbers are those of csrc/bindings/dispatch/lookup/plans.h.
RUN, FAST, BOXED, CALL, ANSWER, FACTS = range(6)


class Source(NamedTuple):
    """A split dim of an output is as long as dim ``along`` of an operand, which ``parts`` ranks
    split."""

    dim: int
    operand: int
    along: int
    parts: int


class OutLayout(NamedTuple):
    """The layout of an output, whatever its sizes: dims that no ``source`` names are whole on each
    rank."""

    layout: Layout
    sources: tuple[Source, ...] = ()


Outs = tuple[TensorSpec, ...] | tuple[OutLayout, ...]


class Plan:
    """How one call is carried out."""

    kind: ClassVar[str] = "plan"
    way: int = RUN
    name: str
    function: Callable[..., Any] | None = None
    # Where the plan serves all sizes each out is an OutLayout, and the last one is used for all
    # further outputs.
    outs: Outs = ()
    any_size: bool = False
    known_shapes: bool = False  # equal specs and arguments give equal shapes
    inplace: bool = False
    adopts: bool = False  # some tensors of the call are plain, and count as broadcast
    kept: bool = True  # the key finds it again
    constant: Any = None
    is_whole: bool = False  # every rank computes all of it
    by_value: bool = False
    by_grad: bool = False
    sizes: tuple | None = None  # what follows the one tensor argument, rewritten for the shard

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        """The call's result; ``tensors`` are those among its arguments, in order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self.name}: {self.kind}"


class Answer(Plan):
    """A question about shapes or dtypes, whose answer is the same at every call with this key."""

    kind = "answer"
    way = ANSWER

    def __init__(self, name: str, constant: Any) -> None:
        super().__init__(name)
        self.constant = constant

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        return self.constant


class OtherCall(Plan):
    """A function that takes the call's arguments unchanged, and answers it by other calls."""

    kind = "other call"
    way = CALL

    def __init__(self, name: str, function: Callable[..., Any], opens: bool = False) -> None:
        super().__init__(name)
        self.function = function
        self.opens = opens  # it is the body of the function, whose ops are calls of their own

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        assert self.function is not None
        return self.function(*args, **kwargs)


class ByFacts(Plan):
    """A call whose plan the key alone does not decide: it also depends on the values of floats, or
    on whether gradients are asked for."""

    kind = "by facts"
    way = FACTS
    any_size = True

    def __init__(self, name: str, by_value: bool, by_grad: bool) -> None:
        super().__init__(name)
        self.by_value, self.by_grad = by_value, by_grad


plans = _C.PlanTable()

# Ops answered without planning, and plans of the ops over lists of tensors; modules that import
# this one enter them.
handlers: dict[str, Callable[..., Any]] = {}
list_ops: dict[str, Callable[..., Plan | None]] = {}


@contextmanager
def looked_up_in(table: _C.PlanTable) -> Iterator[None]:
    """Inside, this thread looks plans up in ``table``, and keeps them there."""
    before = _C.use(table)
    try:
        yield
    finally:
        _C.use(before)


def clear_plans() -> None:
    """Forget all plans, as after a change of the process group."""
    plans.clear()
    plain_values.forget()
    _C.forget_functions()


groups.when_new.append(clear_plans)
