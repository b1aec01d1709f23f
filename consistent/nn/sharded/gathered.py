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

from ...autograd.backward import passes
from ...autograd.unsummed import arriving
from ...dispatch.plans.shards import rebox_several
from ..module_calls import this_thread
from .again import modified
from .order import GatherOrders, GatherUnit, ShardedParameter, find_all
from .saved import (
    Gathering,
    SavedShards,
    enter,
    innermost,
    leave,
    others_in_use,
    release,
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
        if not join_kept(self):
            ForwardRun(self).begin()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Release the gathered parameters (forward hook).

        Calls inside this one that have not ended, as after an error, are ended first.
        """
        found = this_thread.under_way
        if any(run.unit is self for run in found):
            while True:  # the innermost run of these parameters, and all runs inside it
                ended = found.pop()
                ended.end()
                if ended.unit is self:
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
        if join_kept(self) or not self._may_keep():
            this_thread.under_way.append(OneByOne(self))
            return
        if torch.is_grad_enabled():
            self._kept_at = passes()
        KeptRun(self).begin()

    def _may_keep(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        return self.keeper and self._kept_at != passes() and innermost() is None


# -- one run of a module's forward -----------------------------------------------------------------


class ForwardRun:
    """One call of a module's forward on gathered parameters, from ``begin`` to ``end``.

    Args:
        unit: the parameters to gather.

    Attributes:
        keeps: whether submodules that are called inside use the parameters gathered here.
        saves_views: whether autograd saves views without their values, to be gathered again.
    """

    keeps = False  # whether submodules called inside use the parameters gathered here
    saves_views = True  # whether autograd saves views without their values
    _arriving = staticmethod(arriving)  # takes over the gradients in backward

    def __init__(self, unit: GatherUnit) -> None:
        self.unit = unit
        self.hooks: SavedShards | None = None
        self.gathered: dict[int, Gathering] = {}  # by the parameter's id
        # (__dict__ of a module, key, value put there, whether it had the key, its value before)
        self.put: list[tuple[dict, str, Any, bool, Any]] = []

    def begin(self) -> None:
        """Gather the parameters, and put them into the ``__dict__`` of their modules.

        Forward finds them there before torch's own table of parameters.
        """
        this_thread.under_way.append(self)  # first, so that it is ended wherever this raises
        unit = self.unit
        order = None if unit.orders is None else unit.orders.in_forward()
        given = unit.to_gather()
        arrived = None if order is None else find_all(order.arrived(unit), given)
        seen: list[Any] = []
        if given:
            params, targets, coders, _ = zip(*given, strict=True)
            how = {"arrived": arrived, "arriving": self._arriving, "coders": coders}
            seen = rebox_several(params, targets, "gathered parameter", **how)
        if order is not None:
            order.go_on(unit, GatherUnit.wanted)
        rnns: dict[nn.RNNBase, None] = {}
        for each, value in zip(given, seen, strict=True):
            for owner, key, *_ in each.places:
                attributes = owner.__dict__
                self.put.append((attributes, key, value, key in attributes, attributes.get(key)))
                attributes[key] = value
                if isinstance(owner, nn.RNNBase):
                    rnns[owner] = None
        if rnns:
            self._put_weight_lists(rnns)
        self.gathered = {
            id(each.param): Gathering(each, value, unit, position)
            for position, (each, value) in enumerate(zip(given, seen, strict=True))
        }
        if self.saves_views and torch.is_grad_enabled():
            self.hooks = enter(list(self.gathered.values()))

    def _put_weight_lists(self, modules: Iterable[nn.RNNBase]) -> None:
        """Put gathered weights into the lists from which RNN modules read them in forward."""
        for owner in modules:
            weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
            before = owner.__dict__["_flat_weights"]
            self.put.append((owner.__dict__, "_flat_weights", weights, True, before))
            owner.__dict__["_flat_weights"] = weights

    def end(self) -> None:
        """Release the gathered parameters, also after an error in forward or in ``begin``."""
        for attributes, key, value, had, before in reversed(self.put):
            if attributes.get(key) is value:  # else forward has assigned another one, which stays
                if had:
                    attributes[key] = before
                else:
                    del attributes[key]
        gathered, self.put, self.gathered = list(self.gathered.values()), [], {}
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            leave(hooks, gathered)
        release(gathered)


class KeptRun(ForwardRun):
    """A module call that gathers the parameters of all submodules, and lets autograd save them.

    No hooks for saved tensors are used, so what autograd saves is not gathered again in backward.

    Args:
        unit: the parameters of the whole module.
    """

    unit: GatheredTogether
    keeps, saves_views = True, False

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
        if not torch.is_grad_enabled() or innermost() is None or not others_in_use():
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
        held = [each for each in gathered if torch._C._storage_Use_Count(each.storage) > 1]
        super().end()
        self.saved += [(each.local, each.local._version) for each in held]

    def _arriving(self, *given: Any, **how: Any) -> Any:
        """Check in backward that parameters kept by autograd were not written to since forward.

        It then calls ``arriving``, which takes over the gradients of gathered parameters.

        Raises:
            RuntimeError: one was written to; the error is torch's for a modified saved tensor.
        """
        for shard, writes in self.saved:
            if shard._version != writes:
                raise modified(shard.shape, shard._version, writes)
        return arriving(*given, **how)


class OneByOne:
    """A call of a module with a ``GatheredTogether`` that gathers nothing for its submodules.

    Each submodule gathers its own parameters. The object is this call's entry on the stack of calls
    under way, so that ``after_forward`` ends this call and not one around it.

    Args:
        unit: the parameters of the whole module.
    """

    keeps = False

    def __init__(self, unit: GatheredTogether) -> None:
        self.unit = unit

    def end(self) -> None:
        """Do nothing, since nothing was gathered here."""


def join_kept(unit: GatherUnit) -> bool:
    """Return whether an enclosing module call has gathered the parameters of ``unit`` already.

    The call of the unit's own module then gathers none.
    """
    return any(each.keeps and each.serves(unit) for each in this_thread.under_way)
