"""Recorder of ops on global tensors: each op with the numbers of the tensors it reads and makes.

```
program             h = F.relu(x @ w)
plans, compiled     2 = matmul(0, 1)    3 = relu(2)
```

``plan="auto"`` and the choice of layouts of a compiled step use it. A value is identified by its
Python object, not by its memory: what shares memory on one rank may be a copy on another.
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

# Kinds of ops for the choice of layouts. CHOSEN: the op has SBP signatures to choose from. WHOLE:
# its layout is fixed, whatever is chosen around it. MOVE: a ``to_global`` of the program. ON_COPY:
# an in-place op that runs on a B copy of its first operand, which is then boxed back into it.
CHOSEN, WHOLE, MOVE, ON_COPY = "chosen", "whole", "move", "on copy"


@dataclass
class Value:
    """Global tensor that a recorded step reads or makes.

    Args:
        spec: the spec that the op or input gave it.
        kind: what made it: INPUT, PARAMETER, BUFFER, OP, or CONSTANT, if none of these did.
        tracked: whether backward computes its gradient.
        name: name of a parameter, buffer or input.
        fixed: layout of an input that was global already, which the search for layouts must keep.
        pinned: True if the search must keep its layout, because the step returns or keeps the
            tensor, or reads its layout.
    """

    spec: TensorSpec
    kind: str
    tracked: bool
    name: str = ""
    fixed: NdSbp | None = None
    pinned: bool = False


@dataclass
class Op:
    """Op of a recorded step, or a move by ``to_global``. Equal calls share one ``call``.

    Args:
        name: name of the op.
        kind: CHOSEN (its layouts are chosen by rules), WHOLE, MOVE or ON_COPY.
        call: the call, with the specs of its operands and its logical outputs.
        row: the op's rule in the table; None if it runs on gathered (replicated) operands, or is a
            move.
        ins: numbers of the values that it reads.
        outs: numbers of the values that it makes; an in-place op makes its first operand again.
        tracked: for each operand, whether a gradient flows back to it.
        view: True if the result shares memory with the operand, so that the op costs no work.
        module: the innermost module that calls it, if modules are tracked.
        number: its position among all ops that began; None if they are not counted.
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
    """Recorder that numbers the global tensors of a step and describes its ops by these numbers.

    Callbacks of a ``Tracer`` call it while the step runs. ``values`` gets a ``Value`` of each
    tensor, at the index that is its number.
    """

    def __init__(self, values: list[Value]) -> None:
        self.values = values
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}

    def number_or_none(self, x: Any) -> int | None:
        """Return the number of the tensor ``x``, or None if it has none.

        A tensor whose spec has changed since it was numbered has none either.
        """
        entry = self._numbers.get(id(x))
        # An id may be reused by a later object: the weak reference shows whether it was.
        if entry is None or entry[0]() is not x:
            return None
        return entry[1] if self.values[entry[1]].spec is x._spec else None

    def number(self, x: Any) -> int:
        """Return the number of the tensor ``x``, which becomes a CONSTANT if it has none."""
        known = self.number_or_none(x)
        return self.new(x, CONSTANT) if known is None else known

    def new(self, x: Any, kind: str, name: str = "") -> int:
        """Number the tensor ``x`` as a new value, and return the number.

        ``kind`` says what made it, such as OP or PARAMETER.
        """
        self.values.append(Value(x._spec, kind, bool(x.requires_grad), name))
        number = len(self.values) - 1
        self._numbers[id(x)] = weakref.ref(x), number
        return number

    def op(self, plan: Any, given: Sequence[Any], out: Any) -> Op:
        """Return the ``Op`` for an op that has run, and number its results.

        The arguments are those of ``Tracer.on_op_end``.

        Args:
            plan: how the op was carried out.
            given: its arguments, of which only global tensors count.
            out: its result.
        """
        given = [x for x in given if is_global(x)]
        ins = tuple(map(self.number, given))
        call: Call = plan.call
        # Results get new numbers even if they are an operand: contiguous() returns its operand on
        # some ranks and a copy on others, and numbers must not differ between ranks.
        results = given[:1] if call.inplace else [x for x in tensors_in(out) if is_global(x)]
        outs = tuple(self.new(x, OP) for x in results)
        row = None if plan.is_whole or len(call.outs) != len(outs) else table.find_row(plan.name)
        if len(call.outs) != len(results):  # an op without a rule has no planned outputs
            specs = (x._spec for x in results)
            call = replace(call, outs=tuple(Out(x.shape, x.dtype) for x in specs))
        kind = CHOSEN if row is not None else WHOLE
        if isinstance(plan, InPlaceOnCopy):
            kind = ON_COPY
        view = not call.inplace and bool(call.args) and is_view(plan)
        return Op(plan.name, kind, call, row, ins, outs, tuple(map(_is_tracked, given)), view)

    def move(self, x: Any, moved: Any) -> Op:
        """Return the ``Op`` for ``moved = x.to_global(...)``, and number the result.

        The arguments are those of ``Tracer.on_to_global``.
        """
        ins, outs = (self.number(x),), (self.new(moved, OP),)
        operand, moved_spec = Operand(0, x._spec), moved._spec
        call = Call(
            "to_global", (operand,), {}, (operand,), (Out(moved_spec.shape, moved_spec.dtype),)
        )
        return Op("to_global", MOVE, call, None, ins, outs, (_is_tracked(x),), True)


def _is_tracked(x: Any) -> bool:
    return bool(x.requires_grad) and torch.is_grad_enabled()
