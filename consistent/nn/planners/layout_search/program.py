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
    """Event in a ``RecordedStep``: a call of a module begins.

    Attributes:
        module: the name of the module.
        arguments: position or keyword of an argument -> the number of its value.
    """

    module: str
    arguments: Mapping[int | str, int]


@dataclass
class Exit:
    """Event in a ``RecordedStep``: a call of a module ends.

    Attributes:
        module: the name of the module.
        results: position or key in the result -> the number of a value.
    """

    module: str
    results: Mapping[int | str, int]


@dataclass
class RecordedStep:
    """The ops of one step of a model, without layouts, as the layout search uses them.

    Attributes:
        placement: the placement for which a plan is searched.
        values: the tensors of the step; elsewhere they are given by their numbers in this list.
        events: ops, and begin and end of module calls, in order.
        losses: the values on which ``backward()`` is called.
        results: the values that the step returns.
        same: pairs of values that are one tensor.
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
        """Which values share memory, and which are written in place at which event."""
        return AliasedValues(self.timed_ops, self.same)
