"""Division of a model into units (modules that run one after another), grouped into kinds of equal
units.

The model is run once in a simulation of a single rank. Two units are of one kind if they called the
same ops on the same shapes with the same arguments, and have parameters of the same shapes: their
costs are then equal, whatever their attributes are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...graph.reads import is_followed
from ...pipeline.cut import Unit, candidate_units
from ...pipeline.pipeline import loss_of
from ...spec.nested import map_tensors
from ..machines import Machine
from ..simulation.calls import Blank
from ..simulation.log import ModuleEntered, ModuleLeft, SimulatedOp
from ..simulation.simulate import Simulation, simulate


@dataclass
class UnitCall:
    """Recorded call of a unit, or of the loss, from which the unit can be run again.

    Args:
        name: name of the unit; "" is the loss.
        kind: key that is equal for calls of equal cost: ops, shapes and arguments, and parameters.
        arguments: (args, kwargs), with a ``Blank`` in place of each imagined tensor.
        out: the ``Blank`` of each tensor of the result.
    """

    name: str
    kind: Hashable
    arguments: Any
    out: list[Blank]


@dataclass
class RecordedCalls:
    """Recorded calls of a model that was run on a micro-batch of some number of rows.

    Args:
        calls: calls in the order in which they are made, the loss last.
        in_order: whether each unit is called once, in the order in which units are defined.
    """

    calls: list[UnitCall]
    in_order: bool


def units_of(model: nn.Module, stages: int) -> list[Unit]:
    """Return the modules that can be distributed over ``stages`` stages, in order of definition."""
    return [unit for unit in candidate_units(model, max(stages, 2)) if unit.name]


def record_calls(
    model: nn.Module,
    units: Sequence[Unit],
    loss: Callable[..., Any] | None,
    batch: Any,
    machine: Machine,
    bound: float | None,
) -> RecordedCalls:
    """Run the model in a simulation of one rank, and return the calls of its units and of the loss.

    Args:
        units: the parts of ``model`` whose calls are recorded.
        loss: loss function, as passed to ``consistent.nn.pipeline``.
        batch: (args, kwargs, target) of a micro-batch.
        machine: the machine that is simulated.
        bound: assumed share of elements that an op such as ``nonzero`` keeps; see ``simulate``.
    """
    with simulate(1, machine, bound=bound) as sim:
        model = imagined_copy(sim, model)
        loss_module = _Loss(lambda out, target: loss_of(model, loss, out, target))
        args, kwargs, target = map_tensors(batch, lambda x: _imagined_like(sim, x))
        named_modules = [(unit.name, model.get_submodule(unit.name)) for unit in units]
        with sim.calls_of([*named_modules, ("", loss_module)]):
            loss_module(model(*args, **kwargs), target)
    calls = _calls_in(sim.events, model)
    return RecordedCalls(calls, [call.name for call in calls] == [*(u.name for u in units), ""])


def imagined_copy(sim: Simulation, module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with imagined parameters and buffers.

    They have no values and take no memory.
    """
    memo: dict[int, Any] = {}
    for x in (*module.parameters(), *module.buffers()):
        imagined = sim.imagined.empty(x.shape, x.dtype)
        if isinstance(x, nn.Parameter):
            imagined = nn.Parameter(imagined, requires_grad=x.requires_grad)
        memo[id(x)] = imagined
    return copy.deepcopy(module, memo)


def _imagined_like(sim: Simulation, x: Tensor) -> Tensor:
    """Return an imagined tensor for ``x``, or ``x`` itself if programs may read its values."""
    if is_followed(x):
        return x
    return sim.imagined.empty(x.shape, x.dtype)


def _calls_in(events: Sequence[Any], model: nn.Module) -> list[UnitCall]:
    """Return the calls in the log of a simulation, in the order in which they end.

    ``model`` has the called modules by their names.
    """
    begins: dict[str, int] = {}
    calls: list[UnitCall] = []
    for i, event in enumerate(events):
        if isinstance(event, ModuleEntered):
            begins[event.name] = i
        elif isinstance(event, ModuleLeft):
            begin = begins.pop(event.name)
            ops = tuple(e.work.key for e in events[begin:i] if isinstance(e, SimulatedOp))
            module = model.get_submodule(event.name) if event.name else nn.Module()
            params = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
            kind = ops, params, event.name == ""
            calls.append(UnitCall(event.name, kind, events[begin].arguments, event.out))
    return calls


class _Loss(nn.Module):
    """The loss as a module, so that its call is logged like those of units.

    ``value(out, target)`` computes it.
    """

    def __init__(self, value: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._value = value

    def forward(self, out: Any, target: Any) -> Any:
        return self._value(out, target)
