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
from ..simulation.calls import Blank, filled
from ..simulation.peak_memory import highest, net
from ..simulation.simulate import Simulation, simulate
from ..simulation.stages import Part
from ..simulation.timeline import alone
from .units import UnitCall, imagined_copy

Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Cost:
    """Simulated cost of one unit, such as a layer, on one rank for one micro-batch.

    Args:
        forward, backward: seconds.
        kept: bytes of activations that stay from its forward until its backward, including its
            result.
        result: bytes of its result.
        over: the most bytes that forward or backward holds in addition to ``kept``.
        params, state: bytes of its parameters, and of the optimizer's tensors for them.
        trained: bytes of the parameters that require grad.
        step: seconds of the optimizer's step on its parameters.
        issued: seconds that Python needs to issue the optimizer's step.
    """

    forward: float = 0.0
    backward: float = 0.0
    kept: int = 0
    result: int = 0
    over: int = 0
    params: int = 0
    trained: int = 0
    state: int = 0
    step: float = 0.0
    issued: float = 0.0

    def recomputed(self) -> Cost:
        """Return the cost with activation checkpointing: forward runs again in backward.

        Only the result is then kept until backward.
        """
        return replace(
            self,
            backward=self.backward + self.forward,
            kept=self.result,
            over=self.over + self.kept,
        )


class Costs:
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

    def of(self, model: nn.Module, calls: Iterable[tuple[Any, UnitCall]]) -> dict[Any, Cost]:
        """Return the cost of each call of a unit, simulated on the group.

        ``calls`` are (key, call) pairs; the result maps each key to its cost.

        Raises:
            ValueError: the plan does not fit a unit.
        """
        found: dict[Any, Cost] = {}
        planned = Placement("cpu", range(self._ranks), axes=("tp",))
        self._plan_of_all = plan_for(model, plain_slots(model), planned, self._plan)
        with simulate(self._ranks, self._machine, bound=self._bound) as sim:
            placement = Placement(self._machine.device_type, range(self._ranks), axes=("tp",))
            for key, call in calls:
                found[key] = self._cost(sim, model, call, placement)
        return found

    def _cost(
        self, sim: Simulation, model: nn.Module, call: UnitCall, placement: Placement
    ) -> Cost:
        if call.name:
            run, module = self._laid_out(sim, model, call.name, placement)
        else:
            run, module = (lambda out, target: loss_of(model, self._loss, out, target)), nn.Module()
        params: list[Any] = [p for p in module.parameters() if is_global(p)]
        with no_sync():
            for _ in range(2):  # the first run allocates the gradients
                # New arguments for each run, because the unit may write into them.
                given = filled(call.given, lambda x: _global(sim, x, placement))
                forward, result = self._forward(sim, run, given)
                backward = self._backward(sim, result)
                del result
        for p in params:  # gradients of full size, as when the optimizer steps
            if p.grad is not None:
                p.grad = torch.zeros_like(p)
        step, state = self._step(sim, [p for p in params if p.requires_grad])
        clock = alone(step.events, 0, self._machine)
        kept = max(0, net(forward))
        over = max(highest(forward) - kept, highest(backward))
        bytes_of = [(p, p.to_local().nbytes) for p in params]
        return Cost(
            self._seconds(forward),
            self._seconds(backward),
            kept,
            sum(x.nbytes for x in call.out),
            max(0, over),
            sum(n for _, n in bytes_of),
            sum(n for p, n in bytes_of if p.requires_grad),
            state,
            clock.now,
            clock.host,
        )

    def _laid_out(
        self, sim: Simulation, model: nn.Module, name: str, placement: Placement
    ) -> tuple[nn.Module, nn.Module]:
        """Return (parallelized copy of the unit ``name``, module with the copy's parameters)."""
        module = imagined_copy(sim, model.get_submodule(name))
        share = share_of(Cut(((Unit(name, module),),), {}), 0)
        if list(share.parameters()):
            parallelize(share, placement, plan_of_share(self._plan_of_all, share))
        return module, share

    def _forward(self, sim: Simulation, run: Any, given: Any) -> tuple[Part, Any]:
        begin = len(sim.events)
        args, kwargs = given
        result = run(*args, **kwargs)
        return Part(sim.events[begin:]), result

    def _backward(self, sim: Simulation, result: Any) -> Part:
        roots = [x for x in tensors_in(result) if x.requires_grad]
        if not roots:
            return Part()
        seeds = [torch.ones_like(x) for x in roots]
        begin = len(sim.events)
        torch.autograd.backward(roots, seeds)
        return Part(sim.events[begin:])

    def _step(self, sim: Simulation, params: list[Any]) -> tuple[Part, int]:
        """Return (the events of one optimizer step, bytes of its state)."""
        params = [p for p in params if p.grad is not None]
        if not params:
            return Part(), 0
        optimizer = self._optimizer(params)
        begin = len(sim.events)
        optimizer.step()
        # The first step allocates the state; the second is a usual step.
        middle = len(sim.events)
        optimizer.step()
        return Part(sim.events[middle:]), net(Part(sim.events[begin:middle]))

    def _seconds(self, part: Part) -> float:
        return alone(part.events, 0, self._machine).now


def _global(sim: Simulation, x: Blank, placement: Placement) -> Any:
    spec = TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)
    local = sim.imagined.empty(x.shape, x.dtype)
    return attach(local, spec).requires_grad_(x.tracked)
