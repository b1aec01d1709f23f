"""Chain of the global ops of a step, with the values that they read and make."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ...graph.global_ops import Op, Value
from ...rules.signature import Signature


@dataclass
class Chain:
    """Values, and the ops and moves of a step in order. ``why`` says why their layouts cannot be
    chosen together; None if they can."""

    values: list[Value] = field(default_factory=list)
    steps: list[Op] = field(default_factory=list)
    count: int = 0  # number of ops that were started
    why: str | None = None

    @property
    def text(self) -> str:
        """A hash of everything that the choice of layouts depends on, for ranks to compare."""
        parts = [f"{value.spec} {value.pinned}" for value in self.values]
        parts += [
            f"{step.name} {step.kind} {step.call} {step.ins} {step.outs} {step.tracked} "
            f"{step.number}"
            for step in self.steps
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Decision:
    """The chosen signatures of one op, one for each axis. ``name`` and the ``shapes`` of its
    operands identify the op."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[Signature, ...]


@dataclass(frozen=True)
class Solution:
    """The layouts chosen for a step. ``decisions`` maps the number of an op to its decision;
    ``count`` is the number of ops in the step. ``bytes`` (of the busiest rank) and ``seconds`` are
    estimates, (before, after)."""

    decisions: dict[int, Decision]
    count: int
    bytes: tuple[int, int]
    seconds: tuple[float, float]
