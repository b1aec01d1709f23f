"""Gather sharded parameters (ZeRO-3) while the module that owns them runs, and again in backward.

```
            before forward       forward      after it       backward                       after it
weight      S(0) -gather-> B     B            S(0)           S(0) -gather-> B, used, freed   S(0)
its grad                                                     P -reduce-scatter-> S(0)        S(0)
```

If all of them together are small (``Plan.keep_bytes``), they are gathered when the whole module is
called, in one message, and autograd keeps the tensors that it saves until backward has ended:

```
            before the call     the call     after it        backward                       after it
weights     S(0) -gather-> B    B            S(0), B saved   B, used and freed              S(0)
their grads                                                  P -reduce-scatter-> S(0)       S(0)
```

The sharded parameter stays in the module, so ``state_dict``, ``named_parameters`` and optimizers
see it at any moment. When forward reads ``self.weight``, it finds the gathered parameter in the
module's ``__dict__``, which Python searches before torch's table of parameters. Code that reads a
parameter elsewhere finds the sharded global tensor, with the same values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...autograd.backward import pass_count
from ...autograd.unsummed import take_over_gradients
from ...dispatch.plans.shards import rebox_several
from ..module_calls import this_thread
from .again import modified_error
from .order import GatherOrders, GatherUnit, ShardedParameter, take_all_prefetched
from .saved import (
    Gathering,
    SavedShards,
    enter_hooks,
    innermost_hooks,
    leave_hooks,
    other_hooks_in_use,
    release_all,
)


class GatheredParameters(GatherUnit):
    """Parameters that one module gathers for its forward, with the hooks that gather them.

    For ``zero3``, ``before_forward`` gathers them and ``after_forward`` releases them.
    """

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Gather the parameters (forward pre-hook).

        Raises:
            RuntimeError: torch.jit.trace records ``module``.
        """
        if torch._C._is_tracing():
            raise RuntimeError(
                f"torch.jit.trace: {type(module).__name__} has sharded parameters, global tensors "
                "that are gathered at each call, and a trace would keep one rank's copy of them. "
                "Use a plain module, into which consistent.checkpoint.full_state_dict(module) was "
                "loaded."
            )
        self._begin()

    def _begin(self) -> None:
        if not joins_kept_run(self):
            ForwardRun(self).begin()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Release the gathered parameters (forward hook).

        Calls inside this one that have not ended, as after an error, are ended first.
        """
        stack = this_thread.open_runs
        if any(run.unit is self for run in stack):
            while True:  # the innermost run of these parameters, and all runs inside it
                ended_run = stack.pop()
                ended_run.end()
                if ended_run.unit is self:
                    return

    def retire(self) -> None:
        """Stop gathering, when a plan is removed and parameters may move to other ranks.

        Otherwise the backward of a graph that is still alive would prefetch them.
        """
        self.parameters = ()


class GatheredTogether(GatheredParameters):
    """Parameters of a whole module that are gathered at its call, and kept until its backward ends.

    Used if they are small (``Plan.keep_bytes``). Only one call between two backward passes keeps
    them, so that many calls do not hold many copies. In other calls, and inside other hooks for
    saved tensors such as those of a checkpoint, each submodule gathers its own parameters.

    Args:
        parameters: the places of the parameters.
        orders: as in ``GatherUnit``.

    Attributes:
        keeper: whether calls may keep the gathered parameters at all.
    """

    def __init__(
        self, parameters: tuple[ShardedParameter, ...], orders: GatherOrders | None = None
    ) -> None:
        super().__init__(parameters, orders)
        self.keeper = True  # whether calls may keep the gathered parameters
        self._kept_at = -1  # the number of ended backward passes when a call last kept them

    def _begin(self) -> None:
        if joins_kept_run(self) or not self._can_keep():
            this_thread.open_runs.append(UngatheredCall(self))
            return
        if torch.is_grad_enabled():
            self._kept_at = pass_count()
        KeptRun(self).begin()

    def _can_keep(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        return self.keeper and self._kept_at != pass_count() and innermost_hooks() is None


# -- one run of a module's forward -----------------------------------------------------------------


class ForwardRun:
    """One call of a module's forward on gathered parameters, from ``begin`` to ``end``.

    Args:
        unit: the parameters to gather.

    Attributes:
        shares_parameters: whether submodules that are called inside use the parameters gathered
            here.
        saves_views: whether autograd saves views without their values, to be gathered again.
    """

    shares_parameters = False  # whether submodules called inside use the parameters gathered here
    saves_views = True  # whether autograd saves views without their values
    _take_gradients = staticmethod(take_over_gradients)  # takes over the gradients in backward

    def __init__(self, unit: GatherUnit) -> None:
        self.unit = unit
        self.hooks: SavedShards | None = None
        self.gathered: dict[int, Gathering] = {}  # by the parameter's id
        # (__dict__ of a module, key, value put there, whether it had the key, its value before)
        self.replaced_attributes: list[tuple[dict, str, Any, bool, Any]] = []

    def begin(self) -> None:
        """Gather the parameters, and put them into the ``__dict__`` of their modules.

        Forward finds them there before torch's own table of parameters.
        """
        this_thread.open_runs.append(self)  # first, so that it is ended wherever this raises
        unit = self.unit
        order = None if unit.orders is None else unit.orders.current_order()
        to_gather = unit.to_gather()
        prefetched = (
            None if order is None else take_all_prefetched(order.record_gather(unit), to_gather)
        )
        values: list[Any] = []
        if to_gather:
            params, targets, coders, _ = zip(*to_gather, strict=True)
            options = {"arrived": prefetched, "arriving": self._take_gradients, "coders": coders}
            values = rebox_several(params, targets, "gathered parameter", **options)
        if order is not None:
            order.prefetch_next(unit, GatherUnit.wanted)
        rnns: dict[nn.RNNBase, None] = {}
        for item, value in zip(to_gather, values, strict=True):
            for owner, key, *_ in item.places:
                attributes = owner.__dict__
                self.replaced_attributes.append(
                    (attributes, key, value, key in attributes, attributes.get(key))
                )
                attributes[key] = value
                if isinstance(owner, nn.RNNBase):
                    rnns[owner] = None
        if rnns:
            self._put_weight_lists(rnns)
        self.gathered = {
            id(item.param): Gathering(item, value, unit, position)
            for position, (item, value) in enumerate(zip(to_gather, values, strict=True))
        }
        if self.saves_views and torch.is_grad_enabled():
            self.hooks = enter_hooks(list(self.gathered.values()))

    def _put_weight_lists(self, modules: Iterable[nn.RNNBase]) -> None:
        """Put gathered weights into the lists from which RNN modules read them in forward."""
        for owner in modules:
            weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
            previous = owner.__dict__["_flat_weights"]
            self.replaced_attributes.append(
                (owner.__dict__, "_flat_weights", weights, True, previous)
            )
            owner.__dict__["_flat_weights"] = weights

    def end(self) -> None:
        """Release the gathered parameters, also after an error in forward or in ``begin``."""
        for attributes, key, value, had_key, previous in reversed(self.replaced_attributes):
            if attributes.get(key) is value:  # else forward has assigned another one, which stays
                if had_key:
                    attributes[key] = previous
                else:
                    del attributes[key]
        gathered, self.replaced_attributes, self.gathered = list(self.gathered.values()), [], {}
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            leave_hooks(hooks, gathered)
        release_all(gathered)


class KeptRun(ForwardRun):
    """A module call that gathers the parameters of all submodules, and lets autograd save them.

    No hooks for saved tensors are used, so what autograd saves is not gathered again in backward.

    Args:
        unit: the parameters of the whole module.
    """

    unit: GatheredTogether
    shares_parameters, saves_views = True, False

    def __init__(self, unit: GatheredTogether) -> None:
        super().__init__(unit)
        # (shard, its version counter) of parameters of which autograd has saved something.
        self.saved: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Gather the parameters, and put them where forward reads them.

        The gather records a graph even without gradients, since forward may enable them inside.
        """
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            super().begin()

    def serves(self, unit: GatherUnit) -> bool:
        """Return whether this call has gathered the parameters of ``unit``, which a submodule owns.

        If other hooks for saved tensors have been entered since this call began, this call is
        ended, and its module does not keep parameters again. Such hooks may belong to a checkpoint,
        which calls the modules inside it again after this call has ended, and must find the same
        number of saved tensors as the first time.
        """
        if not unit.parameters:
            return False
        first = unit.parameters[0]
        if id(first.owner._parameters.get(first.key)) not in self.gathered:
            return False
        if not torch.is_grad_enabled() or innermost_hooks() is None or not other_hooks_in_use():
            return True
        self.unit.keeper = False
        self.end()
        return False

    def end(self) -> None:
        """Release the gathered parameters, and note those of which autograd has saved something.

        Backward then checks that these were not written to.
        """
        # More than one reference: besides the tensor that forward saw, autograd holds a view.
        gathered = list(self.gathered.values())
        saved_gatherings = [
            each for each in gathered if torch._C._storage_Use_Count(each.storage) > 1
        ]
        super().end()
        self.saved += [(each.local, each.local._version) for each in saved_gatherings]

    def _take_gradients(self, *args: Any, **options: Any) -> Any:
        """Check in backward that parameters kept by autograd were not written to since forward.

        It then calls ``take_over_gradients`` for the gradients of gathered parameters.

        Raises:
            RuntimeError: one was written to; the error is torch's for a modified saved tensor.
        """
        for shard, writes in self.saved:
            if shard._version != writes:
                raise modified_error(shard.shape, shard._version, writes)
        return take_over_gradients(*args, **options)


class UngatheredCall:
    """A call of a module with a ``GatheredTogether`` that gathers nothing for its submodules.

    Each submodule gathers its own parameters. The object is this call's entry on the stack of calls
    under way, so that ``after_forward`` ends this call and not one around it.

    Args:
        unit: the parameters of the whole module.
    """

    shares_parameters = False

    def __init__(self, unit: GatheredTogether) -> None:
        self.unit = unit

    def end(self) -> None:
        """Do nothing, since nothing was gathered here."""


def joins_kept_run(unit: GatherUnit) -> bool:
    """Return whether an enclosing module call has gathered the parameters of ``unit`` already.

    The call of the unit's own module then gathers none.
    """
    return any(each.shares_parameters and each.serves(unit) for each in this_thread.open_runs)
