"""The logical program of a step: values, the ops between them, and the calls of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...rules.signature import Call
from ...rules.table import Row
from ...spec import NdSbp, Placement, TensorSpec

INPUT, PARAMETER, BUFFER, OP, CONSTANT = "input", "parameter", "buffer", "op", "constant"


@dataclass
class Value:
    """A tensor of the program.

    Args:
        spec: logical shape and dtype, as B on the placement.
        kind: what made it. A constant is made by something that is not an op, and is B.
        tracked: whether backward computes its gradient.
        name: of a parameter or buffer, or of an input.
        fixed: of an input that was global: its layout, which is not to be chosen.
    """

    spec: TensorSpec
    kind: str
    tracked: bool
    name: str = ""
    fixed: NdSbp | None = None


@dataclass
class Op:
    """An op: which values it reads and makes. Equal calls share one ``call``.

    ``row`` is None where the op runs whole on every rank. ``view``: its result shares memory with
    its operand. ``module`` is the innermost module that calls it.
    """

    name: str
    call: Call
    row: Row | None
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    view: bool
    module: str


@dataclass
class Enter:
    """A module is called; ``given``: position or keyword of an argument -> value."""

    module: str
    given: Mapping[int | str, int]


@dataclass
class Exit:
    """The call ends; ``given``: position or key in its result -> value."""

    module: str
    given: Mapping[int | str, int]


@dataclass
class Program:
    """Values by number, and what happens in order. ``losses`` are the values that backward begins
    at, ``results`` what the step returns."""

    placement: Placement
    values: list[Value] = field(default_factory=list)
    events: list[Op | Enter | Exit] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)

    @property
    def ops(self) -> list[Op]:
        """The ops in order."""
        return [event for event in self.events if isinstance(event, Op)]
