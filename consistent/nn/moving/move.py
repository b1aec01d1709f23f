"""Move a live training job to other ranks of the world, or to another plan (``move``).

```
            ranks 0-3, zero3                       ranks 0-1, data
weight      S(0): a quarter on each      --->      B: whole on 0 and 1; ranks 2 and 3 follow on meta
.grad       S(0)                         --->      B
state       S(0)                         --->      B
```

1. Each rank plans the move and allocates its new shards; all ranks compare their plans.
2. Each rank receives the pieces that it needs and does not hold, once, and nothing else. Ranks also
   run the collectives that the hooks of the new plan need.
3. All ranks confirm that they have received everything.
4. The tensors of the job take over the new shards, and the new plan's hooks replace the old ones.

An error in 1 to 3 is raised on every rank, and the job is as it was before. Step 4 does not
communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mirrored.every_rank import gather_from_ranks
from mirrored.freed_memory import give_back_freed_memory
from mirrored.transports.default import current

from ...spec import Placement, SbpLike
from ..inputs import check_inputs, inputs_of
from ..installed import drop_prefetches, install, installed_plan, run_install_collectives, uninstall
from ..owned.states import globalize_owned_state
from ..plan import Plan
from ..planners import plan_for
from ..slots import global_slots
from .agree import agree_on_move
from .carry import PendingMove
from .checks import (
    check_added_parameters,
    check_between_steps,
    check_model,
    check_optimizers,
    check_placement,
    check_tensors,
)
from .job import JobToMove


def move(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    placement: Placement | None = None,
    plan: str | Mapping[str, Any] | Plan | None = None,
    *,
    inputs: SbpLike | Mapping[str, SbpLike] | None = None,
) -> torch.nn.Module:
    """Move a training job to other ranks of the same world, or to another plan, between two steps.

    Training continues with the losses that it would have had without the move. Parameters, buffers,
    gradients and the optimizer's tensors stay the same Python objects, in the layouts of the new
    plan, so that references to them (tied weights, parameter groups, schedulers) stay valid. Ranks
    that leave the job follow on ``meta``, like all ranks outside a placement; ranks that join get
    their shards. Random numbers of global tensors do not depend on ranks, and continue. Make the
    data loader again: ``loader(data, placement)``, and ``load_state_dict(old.state_dict())``.

    Every rank of the world calls this with the same arguments. Each rank receives only the pieces
    that it needs and does not hold. Until all have arrived, a rank holds both its old and its new
    shards.

    Args:
        model: a module that was parallelized.
        optimizer: all optimizers of its parameters: one, several or None. The state of an optimizer
            that is left out would stay in its old layout.
        placement: the new placement; by default the present one.
        plan: the new plan, as ``parallelize`` takes it; by default the model's present plan, which
            must fit the placement's axes.
        inputs: the layouts of inputs, as ``parallelize`` takes them; by default the present ones.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an argument cannot be used, or ranks pass different ones.
        RuntimeError: a forward, a backward, ``no_sync`` or an optimizer's step is under way.

    Errors are raised on every rank, and nothing has moved then.
    """

    def prepare() -> PendingMove:
        return _plan_move(model, optimizer, placement, plan, inputs)

    globalize_owned_state(optimizer)
    pending, differing_names = agree_on_move(prepare)
    try:
        pending.send(differing_names)
        run_install_collectives(pending.job.placement, pending.job.plan)
        gather_from_ranks(None)  # a barrier: all ranks have received everything
    except BaseException as error:
        current().abandon(f"move: rank {current().rank} raises {error!r}")
        raise
    job = pending.job
    uninstall(model)
    pending.commit()
    give_back_freed_memory()
    install(model, job.placement, job.plan, job.inputs)
    pending.rewatch_parameters()
    return model


def _plan_move(model: Any, optimizer: Any, placement: Any, plan: Any, inputs: Any) -> PendingMove:
    """Check the arguments, and return the job's tensors with their new shards allocated."""
    check_between_steps(model)
    check_model(model)
    slots = global_slots(model)
    old = check_tensors(slots)
    optimizers = check_optimizers(optimizer, model)
    if placement is None:
        placement = old
    check_placement(placement)
    check_added_parameters(model, old, placement)
    new_inputs: Any = inputs_of(model) if inputs is None else inputs
    try:
        new_plan = plan_for(
            model, slots, placement, installed_plan(model) if plan is None else plan
        )
        if new_inputs is not None:
            check_inputs(model, placement, new_inputs)
    except (TypeError, ValueError) as error:
        text = str(error).replace("parallelize: ", "move: ", 1)
        if new_inputs is not None and inputs is None and "inputs=" in text:
            text += " It was said of the placement before; say inputs= for the new one."
        raise type(error)(text) from None
    job = JobToMove(model, optimizers, old, placement, new_plan, new_inputs)
    job.collect_tensors(slots)
    drop_prefetches(model)
    return PendingMove(job)
