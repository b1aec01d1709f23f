"""The global ops of a step, and the values that lead from one to the next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ...rules.signature import Call, Signature
from ...rules.table import Row
from ...spec import TensorSpec

# What an op is to the choice of layouts: it has signatures; it has one layout, whatever is chosen
# around it; it is a move that the program asks for; it writes into its first operand, which it
# brings back to its layout.
CHOSEN, WHOLE, MOVE, ON_COPY = "chosen", "whole", "move", "on copy"


@dataclass
class Value:
    """A global tensor of the step.

    Args:
        spec: as the op that made it gave it.
        pinned: its layout is not to be chosen: the step returns or keeps it, or asks how it lies.
    """

    spec: TensorSpec
    pinned: bool = False


@dataclass
class Step:
    """An op, or a move.

    Args:
        name: of the op.
        kind: CHOSEN, WHOLE, MOVE or ON_COPY.
        call: with the specs of its operands, and its logical outputs.
        row: its rules; None where it has one layout.
        ins: values that it reads.
        outs: values that it makes; an op in place makes its first operand again.
        tracked: of each operand, whether a gradient comes back to it.
        view: it costs no work.
        number: its place among all ops that were started; None of a move.
    """

    name: str
    kind: str
    call: Call | None
    row: Row | None
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    tracked: tuple[bool, ...]
    view: bool
    number: int | None


@dataclass
class Chain:
    """All of them in order. ``why``: why their layouts cannot be chosen together."""

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    count: int = 0  # ops that were started
    why: str | None = None

    @property
    def text(self) -> str:
        """A hash of all that the choice depends on: ranks compare it."""
        parts = [f"{value.spec} {value.pinned}" for value in self.values]
        parts += [
            f"{step.name} {step.kind} {step.call} {step.ins} {step.outs} {step.tracked} "
            f"{step.number}"
            for step in self.steps
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Decision:
    """What one op is to do: its signature on each axis; ``name`` and ``shapes`` of its operands say
    that it is that op."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[Signature, ...]


@dataclass(frozen=True)
class Solution:
    """``decisions``: number of an op -> what it is to do; ``count``: of ops in the step; estimated
    bytes of the busiest rank and seconds, before and after."""

    decisions: dict[int, Decision]
    count: int
    bytes: tuple[int, int]
    seconds: tuple[float, float]
