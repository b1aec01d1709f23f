"""Cost of a unit (a part of the model, such as a layer): its simulated forward, backward and
optimizer step.

A unit runs on one tensor-parallel group of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...autograd.leaves import no_sync
from ...dispatch.plans.shards import attach, is_global
from ...nn.parallelize import parallelize
from ...nn.planners import plan_for
from ...nn.slots import plain_slots
from ...pipeline.cut import Cut, Unit
from ...pipeline.pipeline import loss_of
from ...pipeline.share import plan_of_share, share_of
from ...spec import B, Placement, TensorSpec
from ...spec.nested import tensors_in
from ..machines import Machine
from ..simulation.calls import Blank, fill_blanks
from ..simulation.peak_memory import net_bytes, peak_bytes
from ..simulation.simulate import Simulation, simulate
from ..simulation.stages import ActionEvents
from ..simulation.timeline import timeline_of_action
from .units import UnitCall, imagined_copy

Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Cost:
    """Simulated cost of one unit, such as a layer, on one rank for one micro-batch.

    Args:
        forward, backward: seconds.
        activation_bytes: bytes of activations that stay from its forward until its backward,
            including its result.
        result: bytes of its result.
        extra_bytes: the most bytes that forward or backward holds in addition to
            ``activation_bytes``.
        params, state: bytes of its parameters, and of the optimizer's tensors for them.
        trainable_bytes: bytes of the parameters that require grad.
        step: seconds of the optimizer's step on its parameters.
        host_seconds: seconds that Python needs to issue the optimizer's step.
    """

    forward: float = 0.0
    backward: float = 0.0
    activation_bytes: int = 0
    result: int = 0
    extra_bytes: int = 0
    params: int = 0
    trainable_bytes: int = 0
    state: int = 0
    step: float = 0.0
    host_seconds: float = 0.0

    def with_recomputation(self) -> Cost:
        """Return the cost with activation checkpointing: forward runs again in backward.

        Only the result is then kept until backward.
        """
        return replace(
            self,
            backward=self.backward + self.forward,
            activation_bytes=self.result,
            extra_bytes=self.extra_bytes + self.activation_bytes,
        )


class CostSimulator:
    """Simulator of the costs of units under one plan, on a tensor-parallel group of ranks.

    Args:
        machine: the machine that is simulated.
        ranks: number of ranks of the group.
        plan: name of the strategy along the group's axis, such as "tensor".
        loss: the loss, as passed to the search.
        optimizer: function that makes an optimizer from parameters.
        bound: assumed share of elements that an op such as ``nonzero`` keeps; see ``simulate``.
    """

    def __init__(
        self,
        machine: Machine,
        ranks: int,
        plan: str,
        loss: Callable[..., Any] | None,
        optimizer: Optimizer,
        bound: float | None,
    ) -> None:
        self._machine, self._ranks, self._plan = machine, ranks, plan
        self._loss, self._optimizer, self._bound = loss, optimizer, bound

    def simulate_calls(
        self, model: nn.Module, calls: Iterable[tuple[Any, UnitCall]]
    ) -> dict[Any, Cost]:
        """Return the cost of each call of a unit, simulated on the group.

        ``calls`` are (key, call) pairs; the result maps each key to its cost.

        Raises:
            ValueError: the plan does not fit a unit.
        """
        costs: dict[Any, Cost] = {}
        plan_placement = Placement("cpu", range(self._ranks), axes=("tp",))
        self._model_plan = plan_for(model, plain_slots(model), plan_placement, self._plan)
        with simulate(self._ranks, self._machine, bound=self._bound) as sim:
            placement = Placement(self._machine.device_type, range(self._ranks), axes=("tp",))
            for key, call in calls:
                costs[key] = self._cost(sim, model, call, placement)
        return costs

    def _cost(
        self, sim: Simulation, model: nn.Module, call: UnitCall, placement: Placement
    ) -> Cost:
        if call.name:
            run, module = self._parallelized_unit(sim, model, call.name, placement)
        else:
            run, module = (lambda out, target: loss_of(model, self._loss, out, target)), nn.Module()
        params: list[Any] = [p for p in module.parameters() if is_global(p)]
        with no_sync():
            for _ in range(2):  # the first run allocates the gradients
                # New arguments for each run, because the unit may modify them in place.
                arguments = fill_blanks(
                    call.arguments, lambda x: _imagined_global(sim, x, placement)
                )
                forward, result = self._forward(sim, run, arguments)
                backward = self._backward(sim, result)
                del result
        for p in params:  # gradients of full size, as when the optimizer steps
            if p.grad is not None:
                p.grad = torch.zeros_like(p)
        step, state = self._step(sim, [p for p in params if p.requires_grad])
        clock = timeline_of_action(step.events, 0, self._machine)
        activation_bytes = max(0, net_bytes(forward))
        extra_bytes = max(peak_bytes(forward) - activation_bytes, peak_bytes(backward))
        bytes_of = [(p, p.to_local().nbytes) for p in params]
        return Cost(
            self._seconds(forward),
            self._seconds(backward),
            activation_bytes,
            sum(x.nbytes for x in call.out),
            max(0, extra_bytes),
            sum(n for _, n in bytes_of),
            sum(n for p, n in bytes_of if p.requires_grad),
            state,
            clock.now,
            clock.host,
        )

    def _parallelized_unit(
        self, sim: Simulation, model: nn.Module, name: str, placement: Placement
    ) -> tuple[nn.Module, nn.Module]:
        """Return (parallelized copy of the unit ``name``, module with the copy's parameters)."""
        module = imagined_copy(sim, model.get_submodule(name))
        share = share_of(Cut(((Unit(name, module),),), {}), 0)
        if list(share.parameters()):
            parallelize(share, placement, plan_of_share(self._model_plan, share))
        return module, share

    def _forward(self, sim: Simulation, run: Any, arguments: Any) -> tuple[ActionEvents, Any]:
        begin = len(sim.events)
        args, kwargs = arguments
        result = run(*args, **kwargs)
        return ActionEvents(sim.events[begin:]), result

    def _backward(self, sim: Simulation, result: Any) -> ActionEvents:
        roots = [x for x in tensors_in(result) if x.requires_grad]
        if not roots:
            return ActionEvents()
        seeds = [torch.ones_like(x) for x in roots]
        begin = len(sim.events)
        torch.autograd.backward(roots, seeds)
        return ActionEvents(sim.events[begin:])

    def _step(self, sim: Simulation, params: list[Any]) -> tuple[ActionEvents, int]:
        """Return (the events of one optimizer step, bytes of its state)."""
        params = [p for p in params if p.grad is not None]
        if not params:
            return ActionEvents(), 0
        optimizer = self._optimizer(params)
        begin = len(sim.events)
        optimizer.step()
        # The first step allocates the state; the second is a usual step.
        middle = len(sim.events)
        optimizer.step()
        return ActionEvents(sim.events[middle:]), net_bytes(ActionEvents(sim.events[begin:middle]))

    def _seconds(self, part: ActionEvents) -> float:
        return timeline_of_action(part.events, 0, self._machine).now


def _imagined_global(sim: Simulation, x: Blank, placement: Placement) -> Any:
    spec = TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)
    local = sim.imagined.empty(x.shape, x.dtype)
    return attach(local, spec).requires_grad_(x.tracked)
