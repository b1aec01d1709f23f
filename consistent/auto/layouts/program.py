"""Logical program of a step: values, the ops between them, and the calls of modules.

It is recorded on tensors that are B, so each spec describes only the logical tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...graph.global_ops import Op, Value
from ...spec import Placement


@dataclass
class Enter:
    """Begin of a module call; ``given`` maps position or keyword of an argument -> value."""

    module: str
    given: Mapping[int | str, int]


@dataclass
class Exit:
    """End of a module call; ``given`` maps position or key in its result -> value."""

    module: str
    given: Mapping[int | str, int]


@dataclass
class Program:
    """Values by number, and the events in order.

    ``losses`` are the values at which backward begins, ``results`` what the step returns.
    """

    placement: Placement
    values: list[Value] = field(default_factory=list)
    events: list[Op | Enter | Exit] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)

    @property
    def ops(self) -> list[Op]:
        """The ops in order."""
        return [event for event in self.events if isinstance(event, Op)]
