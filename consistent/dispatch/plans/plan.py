"""``Plan``, the cached description of how a call is carried out, and the tables that hold plans.

A plan is data that can run itself: it can be printed and compared in tests. The C++ hook reads how
to run it (``way``), what to call (``function``) and the specs or layouts of its outputs (``outs``).
The hook runs the simple kinds itself, and calls ``run`` of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from mirrored.transports.torch_dist import groups

from ...movement import plain_values
from ...spec import Layout, TensorSpec
from .. import _C

# How the hook runs a plan; must match the numbers in csrc/bindings/dispatch/lookup/plans.h.
RUN, FAST, BOXED, CALL, ANSWER, FACTS = range(6)


class LengthSource(NamedTuple):
    """Says which operand dim gives a split dim of an output its length.

    Dim ``dim`` of the output is as long as dim ``along`` of operand ``operand``, which is split
    over ``parts`` ranks. Plans that serve all sizes compute the logical shape of an output from
    this.
    """

    dim: int
    operand: int
    along: int
    parts: int


class OutLayout(NamedTuple):
    """The layout of an output in a plan that serves all sizes.

    ``sources`` say for each split dim where its logical length comes from. A dim that is not split
    needs none: its length is that of the shard.
    """

    layout: Layout
    sources: tuple[LengthSource, ...] = ()


Outs = tuple[TensorSpec, ...] | tuple[OutLayout, ...]


class Plan:
    """Cached instructions to carry out a call; the hook looks a plan up by the call's key.

    The attributes are read by the C++ hook, which runs the simple kinds of plan itself.
    """

    kind: ClassVar[str] = "plan"
    way: int = RUN
    name: str
    function: Callable[..., Any] | None = None
    # Specs of the outputs. If the plan serves all sizes, these are OutLayouts instead, and the last
    # one applies to all further outputs.
    outs: Outs = ()
    any_size: bool = False
    known_shapes: bool = False  # equal specs and arguments imply equal output shapes
    inplace: bool = False
    adopts: bool = False  # some tensors of the call are plain; they become B global tensors
    kept: bool = True  # the plan is cached under the key
    constant: Any = None
    is_whole: bool = False  # every rank computes the whole op
    by_value: bool = False  # of ``ByFacts``: the longer key has the values of floats
    by_grad: bool = False  # of ``ByFacts``: the longer key has whether gradients are needed
    # The arguments after the first one (the only tensor), with the shard's sizes for logical ones.
    sizes: tuple | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        """Carry out the call and return its result.

        ``tensors`` are the tensors among the arguments, in order.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self.name}: {self.kind}"


class Answer(Plan):
    """Plan of a query about shapes or dtypes: calls with this key have the answer ``constant``."""

    kind = "answer"
    way = ANSWER

    def __init__(self, name: str, constant: Any) -> None:
        super().__init__(name)
        self.constant = constant

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        return self.constant


class OtherCall(Plan):
    """Plan that passes the call's arguments unchanged to a function, which makes other calls.

    Used for calls that are rewritten (``x.sum(out=y)``) and for torch's Python functions.
    """

    kind = "other call"
    way = CALL

    def __init__(self, name: str, function: Callable[..., Any], opens: bool = False) -> None:
        super().__init__(name)
        self.function = function
        self.opens = opens  # `function` is torch's own Python body, whose ops are dispatched

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        assert self.function is not None
        return self.function(*args, **kwargs)


class ByFacts(Plan):
    """Plan that makes the hook look up another plan, by a key with more facts about the call.

    The first key has the function, the specs and the static arguments, without the values of
    floats. The correct plan also depends on these values (``by_value``), or on whether gradients
    are needed (``by_grad``).
    """

    kind = "by facts"
    way = FACTS
    any_size = True

    def __init__(self, name: str, by_value: bool, by_grad: bool) -> None:
        super().__init__(name)
        self.by_value, self.by_grad = by_value, by_grad


plans = _C.PlanTable()

# Op name -> function that carries out the op without a plan; prefix of names -> planner of the list
# ops (``torch._foreach_*``, ...) with that prefix. Modules that import this one register them.
handlers: dict[str, Callable[..., Any]] = {}
list_ops: dict[str, Callable[..., Plan | None]] = {}


@contextmanager
def use_plan_table(table: _C.PlanTable) -> Iterator[None]:
    """Make this thread look up and cache plans in the plan table ``table``, inside the context.

    Used where calls must neither use nor fill the plans of the program, as in a simulated run.
    """
    previous_table = _C.use(table)
    try:
        yield
    finally:
        _C.use(previous_table)


def clear_plans() -> None:
    """Drop all cached plans; called after a change of the process group."""
    plans.clear()
    plain_values.reset_counts()
    _C.forget_functions()


groups.new_group_callbacks.append(clear_plans)
