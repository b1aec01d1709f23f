"""Recorded ops on global tensors of a step, with the values that they read and make: the input of
the layout search."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ...graph.global_ops import Op, Value
from ...rules.signature import Signature


@dataclass
class Chain:
    """Recorded ops of a step on global tensors: the input of the layout search.

    Args:
        values: the global tensors; a ``pinned`` one must keep its layout.
        steps: the ops, and the calls of ``to_global``, in order. They refer to values by index.
        count: number of ops that have begun; an op's number is the count before it.
        why: the reason why their layouts cannot be chosen together; None if they can.
    """

    values: list[Value] = field(default_factory=list)
    steps: list[Op] = field(default_factory=list)
    count: int = 0  # number of ops that were started
    why: str | None = None

    @property
    def text(self) -> str:
        """Hash of everything that the choice of layouts depends on, to compare between ranks."""
        parts = [f"{value.spec} {value.pinned}" for value in self.values]
        parts += [
            f"{step.name} {step.kind} {step.call} {step.ins} {step.outs} {step.tracked} "
            f"{step.number}"
            for step in self.steps
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Decision:
    """Chosen layouts of one op: an SBP signature (inputs and outputs) for each placement axis.

    ``name`` and the ``shapes`` of the operands identify the op when the step runs again.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[Signature, ...]


@dataclass(frozen=True)
class Solution:
    """Chosen layouts of all ops of a step.

    Args:
        decisions: number of an op, in the order of the calls -> its decision.
        count: number of ops in the step.
        bytes, seconds: (before, after) of the estimated bytes that the busiest rank sends, and of
            the estimated seconds.
    """

    decisions: dict[int, Decision]
    count: int
    bytes: tuple[int, int]
    seconds: tuple[float, float]
