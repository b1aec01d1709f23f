"""The recorder of global ops: each op, by the numbers of the tensors that it reads and makes.

```
program             h = F.relu(x @ w)
plans, compiled     2 = matmul(0, 1)    3 = relu(2)
```

``plan="auto"`` and the choice of layouts of a compiled step read it. A value is known by its Python
object. Its memory would not do: what is a part of another memory on one rank may be a copy on
another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..dispatch.running.on_shards import InPlaceOnCopy
from ..dispatch.running.views import is_view
from ..rules import table
from ..rules.signature import Call, Operand, Out
from ..rules.table import Row
from ..spec import NdSbp, TensorSpec
from ..spec.nested import tensors_in

INPUT, PARAMETER, BUFFER, OP, CONSTANT = "input", "parameter", "buffer", "op", "constant"

# What an op is to the choice of layouts: it has signatures; it has one layout, whatever is chosen
# around it; it is a move that the program asks for; it writes into its first operand, which it
# brings back to its layout.
CHOSEN, WHOLE, MOVE, ON_COPY = "chosen", "whole", "move", "on copy"


@dataclass
class Value:
    """A global tensor of the step.

    Args:
        spec: as what made it gave it.
        kind: what made it. A constant is made by something that is not an op.
        tracked: whether backward computes its gradient.
        name: of a parameter or buffer, or of an input.
        fixed: of an input that was global: its layout, which is not to be chosen.
        pinned: its layout is not to be chosen: the step returns or keeps it, or asks how it lies.
    """

    spec: TensorSpec
    kind: str
    tracked: bool
    name: str = ""
    fixed: NdSbp | None = None
    pinned: bool = False


@dataclass
class Op:
    """An op, or a move. Equal calls share one ``call``.

    Args:
        name: of the op.
        kind: CHOSEN, WHOLE, MOVE or ON_COPY.
        call: with the specs of its operands, and its logical outputs.
        row: its rules; None where it runs whole on every rank, or moves.
        ins: values that it reads.
        outs: values that it makes; an op in place makes its first operand again.
        tracked: of each operand, whether a gradient comes back to it.
        view: its result shares memory with its operand: it costs no work.
        module: the innermost module that calls it, where modules are followed.
        number: its place among all ops that were started, where these are counted.
    """

    name: str
    kind: str
    call: Call
    row: Row | None
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    tracked: tuple[bool, ...]
    view: bool
    module: str = ""
    number: int | None = None


class GlobalOps:
    """Numbers the global tensors that it meets, into ``values``."""

    def __init__(self, values: list[Value]) -> None:
        self.values = values
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}

    def known(self, x: Any) -> int | None:
        """The number of ``x``; None if it has none, or is laid in another way by now."""
        found = self._numbers.get(id(x))
        if found is None or found[0]() is not x:
            return None
        return found[1] if self.values[found[1]].spec is x._spec else None

    def number(self, x: Any) -> int:
        """The number of ``x``, which is a constant if nothing that is known has made it."""
        known = self.known(x)
        return self.new(x, CONSTANT) if known is None else known

    def new(self, x: Any, kind: str, name: str = "") -> int:
        """A number for ``x``, as something has just made it."""
        self.values.append(Value(x._spec, kind, bool(x.requires_grad), name))
        number = len(self.values) - 1
        self._numbers[id(x)] = weakref.ref(x), number
        return number

    def op(self, plan: Any, given: Sequence[Any], out: Any) -> Op:
        """The op that has run, as ``Tracer.on_op_end`` tells it."""
        given = [x for x in given if is_global(x)]
        ins = tuple(map(self.number, given))
        call: Call = plan.call
        # contiguous() gives its operand itself on some ranks, and a copy on others.
        made = given[:1] if call.inplace else [x for x in tensors_in(out) if is_global(x)]
        outs = tuple(self.new(x, OP) for x in made)
        row = None if plan.is_whole or len(call.outs) != len(outs) else table.find(plan.name)
        if len(call.outs) != len(made):  # of an op without a rule they were not planned
            specs = (x._spec for x in made)
            call = replace(call, outs=tuple(Out(x.shape, x.dtype) for x in specs))
        kind = CHOSEN if row is not None else WHOLE
        if isinstance(plan, InPlaceOnCopy):
            kind = ON_COPY
        view = not call.inplace and bool(call.args) and is_view(plan)
        return Op(plan.name, kind, call, row, ins, outs, tuple(map(_is_tracked, given)), view)

    def move(self, x: Any, moved: Any) -> Op:
        """A ``to_global`` that the program asks for, as ``Tracer.on_to_global`` tells it."""
        ins, outs = (self.number(x),), (self.new(moved, OP),)
        operand, made = Operand(0, x._spec), moved._spec
        call = Call("to_global", (operand,), {}, (operand,), (Out(made.shape, made.dtype),))
        return Op("to_global", MOVE, call, None, ins, outs, (_is_tracked(x),), True)


def _is_tracked(x: Any) -> bool:
    return bool(x.requires_grad) and torch.is_grad_enabled()
