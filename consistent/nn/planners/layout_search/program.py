"""Logical program of a step, free of layouts: values, the ops between them, and the module calls.

It is recorded on replicated tensors, so each spec describes only the logical tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ....graph.global_ops import Op, Value
from ....layout_problem.shared_memory import AliasedValues
from ....spec import Placement


@dataclass
class Enter:
    """Event that marks the beginning of a module call.

    ``given`` maps the position or keyword of an argument to the number of its value.
    """

    module: str
    given: Mapping[int | str, int]


@dataclass
class Exit:
    """Event that marks the end of a module call.

    ``given`` maps the position or key in its result to the number of a value.
    """

    module: str
    given: Mapping[int | str, int]


@dataclass
class RecordedStep:
    """Recorded step: its values, and its events (ops, begin and end of module calls) in order.

    ``losses`` are the numbers of the values on which ``backward()`` is called, ``results`` those of
    the values that the step returns.
    """

    placement: Placement
    values: list[Value] = field(default_factory=list)
    events: list[Op | Enter | Exit] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    # Pairs of values that are one tensor.
    same: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ops(self) -> list[Op]:
        """The events that are ops, in order."""
        return [event for _, event in self.timed_ops]

    @property
    def timed_ops(self) -> list[tuple[int, Op]]:
        """The events that are ops, each with its position among all events."""
        return [(at, event) for at, event in enumerate(self.events) if isinstance(event, Op)]

    @cached_property
    def memory(self) -> AliasedValues:
        """What shares memory and is written in place, by positions among the events."""
        return AliasedValues(self.timed_ops, self.same)
