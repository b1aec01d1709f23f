"""move: take a live training job to other ranks of the world, or to another plan.

```
            ranks 0-3, zero3                       ranks 0-1, data
weight      S(0): a quarter on each      --->      B: whole on 0 and 1; ranks 2 and 3 follow on meta
.grad       S(0)                         --->      B
state       S(0)                         --->      B
```

1. Each rank plans by itself and allocates what it is to hold; all ranks compare.
2. What a rank needs and does not hold is sent to it: once, and nothing else is. Ranks also ask
   what the new plan's hooks have to know of each other.
3. All ranks say that they have everything.
4. The tensors of the job take over what came, and the new plan's hooks replace the old one's.

An error in 1 to 3 is raised on every rank, and the job is as it was. Nothing moves in step 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mirrored.every_rank import gathered
from mirrored.freed_memory import give_back_freed_memory
from mirrored.transports.default import current

from ...spec import Placement, SbpLike
from ..inputs import check_inputs, inputs_of
from ..installed import ask_for_install, install, installed_plan, settle, take_off
from ..owned.states import show_owned
from ..plan import Plan
from ..planners import plan_for
from ..slots import global_slots
from .agree import agreed
from .carry import Carried
from .checks import (
    check_added,
    check_model,
    check_moment,
    check_optimizers,
    check_placement,
    check_tensors,
)
from .job import Job


def move(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    placement: Placement | None = None,
    plan: str | Mapping[str, Any] | Plan | None = None,
    *,
    inputs: SbpLike | Mapping[str, SbpLike] | None = None,
) -> torch.nn.Module:
    """Take a training job to other ranks of the same world, or to another plan, between two steps.
    Its next losses are those that it would have had.

    Parameters, buffers, gradients and the optimizer's tensors stay the same Python objects and lie
    as the new plan says; so what refers to them (tied weights, parameter groups, schedulers) goes
    on. Ranks that leave follow on ``meta``, as all ranks outside a placement do; ranks that come in
    get their shards. Random numbers of global tensors do not depend on ranks, and go on. A data
    loader is made again: ``loader(data, placement)``, and ``load_state_dict(old.state_dict())``.

    Every rank of the world calls this with the same arguments. Each receives only what it needs and
    does not hold. Until all has arrived a rank holds both what it had and what it gets.

    Args:
        model: a module that was given to ``parallelize``.
        optimizer: that of its parameters, or several, or None. Without an optimizer its state would
            be left where it is, so name all that there are.
        placement: where the job goes; without it, where it is.
        plan: as ``parallelize`` takes it; without it the plan that the model has, which must fit
            the placement's axes.
        inputs: as ``parallelize`` takes it; without it as it was given there.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an argument cannot be used, or ranks give different ones.
        RuntimeError: a forward, a backward, ``no_sync`` or an optimizer's step is under way.

    Errors are raised on every rank, and nothing has moved.
    """

    def prepare() -> Carried:
        return _planned(model, optimizer, placement, plan, inputs)

    show_owned(optimizer)
    carried, different = agreed(prepare)
    try:
        carried.send(different)
        ask_for_install(carried.job.placement, carried.job.plan)
        gathered(None)  # all have everything
    except BaseException as error:
        current().abandon(f"move: rank {current().rank} raises {error!r}")
        raise
    job = carried.job
    take_off(model)
    carried.put()
    give_back_freed_memory()
    install(model, job.placement, job.plan, job.inputs)
    carried.watch()
    return model


def _planned(model: Any, optimizer: Any, placement: Any, plan: Any, inputs: Any) -> Carried:
    """What is to be moved, with room for it on this rank."""
    check_moment(model)
    check_model(model)
    slots = global_slots(model)
    old = check_tensors(slots)
    optimizers = check_optimizers(optimizer, model)
    if placement is None:
        placement = old
    check_placement(placement)
    check_added(model, old, placement)
    given: Any = inputs_of(model) if inputs is None else inputs
    try:
        decided = plan_for(model, slots, placement, installed_plan(model) if plan is None else plan)
        if given is not None:
            check_inputs(model, placement, given)
    except (TypeError, ValueError) as error:
        words = str(error).replace("parallelize: ", "move: ", 1)
        if given is not None and inputs is None and "inputs=" in words:
            words += " It was said of the placement before; say inputs= for the new one."
        raise type(error)(words) from None
    job = Job(model, optimizers, old, placement, decided, given)
    job.enter(slots)
    settle(model)
    return Carried(job)
