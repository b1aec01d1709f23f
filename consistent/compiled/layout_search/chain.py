"""The global ops of a step, and the values that lead from one to the next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ...graph.global_ops import Op, Value
from ...rules.signature import Signature


@dataclass
class Chain:
    """Values, and ops and moves in order. ``why``: why their layouts cannot be chosen together."""

    values: list[Value] = field(default_factory=list)
    steps: list[Op] = field(default_factory=list)
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
