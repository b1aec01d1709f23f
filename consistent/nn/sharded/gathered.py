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

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from ...autograd.backward import passes
from ...autograd.unsummed import arriving
from ...dispatch.plans.shards import HookOff, attach, is_global, plain
from ...movement import check_mode
from ...movement.boxed import box_several
from ...movement.coded import gather_each
from ...movement.coders import Coder
from ...spec import NdSbp, TensorSpec
from ..module_calls import under_way
from . import saved
from .gathering import Gathering, modified
from .prefetch import Orders, Wanted, find


class ShardedParameter(NamedTuple):
    """Place of a sharded parameter in a module, its layout in forward, and its codecs if any."""

    owner: nn.Module
    key: str
    use: NdSbp
    coder: Coder | None = None

    @property
    def value(self) -> Any:
        """Return the module's present parameter; it may have been replaced since."""
        return self.owner._parameters.get(self.key)

    def begun_coder(self) -> Coder | None:
        """Return the codecs, with their state if the parameter needs a gradient by now."""
        if self.coder is not None and is_global(self.value):
            self.coder.begin(self.value)
        return self.coder


class GatheredParameters:
    """Parameters that are gathered while one module runs, with the hooks that gather them.

    Args:
        parameters: the places of the parameters.
        orders: the prefetch orders of the whole module, of which these parameters are one step;
            None without prefetching.
    """

    def __init__(self, parameters: tuple[ShardedParameter, ...], orders: Orders | None) -> None:
        self.parameters, self.orders = parameters, orders
        # The positions of parameters that a backward began with. They are kept from forward until
        # backward: freeing them would save no memory, since backward gathers them first of all.
        self.opens_backward: set[int] = set()

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
            Run(self).begin()

    def wanted(self) -> list[tuple[Any, TensorSpec, Coder | None]]:
        """Return (parameter, spec in forward, codecs) of each parameter to gather, each once."""
        found: dict[int, tuple[Any, TensorSpec, Coder | None]] = {}
        for each in self.parameters:
            param = each.value
            if is_global(param) and param._spec.sbp != each.use:
                dst = param._spec.with_sbp(each.use)
                found.setdefault(id(param), (param, dst, each.begun_coder()))
        return list(found.values())

    def parts(self) -> list[Wanted]:
        """Return (shard, its spec, spec in forward, codecs) of each parameter, to prefetch it."""
        return [(plain(x).detach(), x._spec, dst, coder) for x, dst, coder in self.wanted()]

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Release the gathered parameters (forward hook)."""
        Run.end_of(self)

    def retire(self) -> None:
        """Stop gathering: the hooks are removed, and parameters may be on other ranks now.

        Otherwise the backward of a graph that is still alive would prefetch them.
        """
        self.parameters = ()

    def __deepcopy__(self, memo: dict) -> GatheredParameters:
        memo[id(self)] = new = type(self)((), self.orders)
        new.parameters = copy.deepcopy(self.parameters, memo)
        return new


class GatheredTogether(GatheredParameters):
    """Parameters of a whole module that are gathered at its call, and kept until its backward ends.

    Used if they are small together. Only one call between two backward passes keeps them, so that
    many calls do not hold many copies. In other calls, and inside other hooks for saved tensors
    such as those of a checkpoint, each submodule gathers its own parameters.
    """

    def __init__(
        self, parameters: tuple[ShardedParameter, ...], orders: Orders | None = None
    ) -> None:
        super().__init__(parameters, orders)
        self.keeper = True  # whether calls may keep the gathered parameters
        self._kept_at = -1  # the number of ended backward passes when a call last kept them

    def _begin(self) -> None:
        if join_kept(self) or not self._may_keep():
            OneByOne(self).begin()
            return
        if torch.is_grad_enabled():
            self._kept_at = passes()
        KeptRun(self).begin()

    def _may_keep(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        return self.keeper and self._kept_at != passes() and saved.innermost() is None


# -- one run of a module's forward -----------------------------------------------------------------


class Run:
    """Run of a module's forward on gathered parameters, from ``begin`` to ``end``."""

    def __init__(self, unit: GatheredParameters) -> None:
        self.unit = unit
        self.hooks: saved.SavedShards | None = None
        self.gathered: dict[int, Gathering] = {}  # by the parameter's id
        # (__dict__ of a module, key, value put there, whether it had the key, its value before)
        self.put: list[tuple[dict, str, Any, bool, Any]] = []

    @staticmethod
    def end_of(unit: GatheredParameters) -> None:
        """End the innermost run of ``unit``, and all runs inside it."""
        found = under_way()
        if any(run.unit is unit for run in found):
            while True:
                ended = found.pop()
                ended.end()
                if ended.unit is unit:
                    return

    def begin(self) -> None:
        """Gather the parameters, and put them where forward reads them."""
        under_way().append(self)  # first, so that it is ended wherever this raises
        if torch.is_grad_enabled():
            self.hooks = saved.enter()
        order = None if self.unit.orders is None else self.unit.orders.in_forward()
        self._gather(None if order is None else order.arrived(self.unit))
        self._show()
        if order is not None:
            order.go_on(self.unit, lambda following: following.parts())

    def _show(self) -> None:
        """Put the gathered parameters into the ``__dict__`` of their modules."""
        owners: dict[nn.Module, None] = {}
        for each in self.unit.parameters:
            found = self.gathered.get(id(each.value))
            if found is not None:
                self._put(each.owner, each.key, found.seen)
                owners[each.owner] = None
        for owner in owners:
            if isinstance(owner, nn.RNNBase):  # its forward reads weights from a list
                weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
                self._put(owner, "_flat_weights", weights)

    def _gather(self, coming: Any) -> None:
        wanted = self.unit.wanted()
        if not wanted:
            return
        made = [
            Gathering(param, dst, coder, self.unit.orders, (self.unit, position))
            for position, (param, dst, coder) in enumerate(wanted)
        ]
        arrived = [find(coming, each.local, each.dst) for each in made]
        given = arrived if all(x is not None for x in arrived) else None
        for each, whole in zip(made, _boxed(made, given, self._arriving), strict=True):
            self._enter(each, whole)

    _arriving = staticmethod(arriving)

    def _enter(self, each: Gathering, whole: Any) -> None:
        if self.hooks is not None:
            self.hooks.add(whole, each)
            if len(self.gathered) in self.unit.opens_backward:
                each.whole = plain(whole).detach()
        self.gathered[id(each.param)] = each
        each.show(whole)

    def _put(self, owner: nn.Module, key: str, value: Any) -> None:
        attributes = owner.__dict__
        self.put.append((attributes, key, value, key in attributes, attributes.get(key)))
        attributes[key] = value

    def end(self) -> None:
        """Release the gathered parameters, also after an error in forward or in ``begin``."""
        for attributes, key, value, had, before in reversed(self.put):
            if attributes.get(key) is value:  # else forward has assigned another one, which stays
                if had:
                    attributes[key] = before
                else:
                    del attributes[key]
        gathered, self.put, self.gathered = list(self.gathered.values()), [], {}
        for each in gathered:
            each.hide()
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            saved.leave(hooks, gathered)
        for each in gathered:
            self._release(each)

    def _release(self, each: Gathering) -> None:
        each.release()


class KeptRun(Run):
    """Run that gathers for all submodules, and lets autograd keep the gathered values.

    No hooks for saved tensors are used, so what autograd saves is not gathered again in backward.
    """

    unit: GatheredTogether

    def __init__(self, unit: GatheredTogether) -> None:
        super().__init__(unit)
        # (shard, its version counter) of parameters of which autograd has saved something.
        self.saved: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Gather the parameters, and put them where forward reads them.

        The gather records a graph even without gradients, since forward may enable them inside.
        """
        under_way().append(self)
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            self._gather(None)
        self._show()

    def _release(self, each: Gathering) -> None:
        # More than one reference: besides the tensor that forward saw, autograd holds a view.
        is_saved = torch._C._storage_Use_Count(each.storage) > 1
        each.release()
        if is_saved:
            self.saved.append((each.local, each.local._version))

    def _arriving(self, *given: Any, **how: Any) -> Any:
        for shard, writes in self.saved:
            if shard._version != writes:
                raise modified(shard.shape, shard._version, writes)
        return arriving(*given, **how)


class OneByOne:
    """Run of a ``GatheredTogether`` that gathers nothing: each submodule gathers its own."""

    def __init__(self, unit: GatheredTogether) -> None:
        self.unit = unit

    def begin(self) -> None:
        """Push this run, so that ``Run.end_of`` ends it and not a run around it."""
        under_way().append(self)

    def end(self) -> None:
        """Do nothing, since nothing was gathered here."""


def join_kept(unit: GatheredParameters) -> bool:
    """Return whether an enclosing ``KeptRun`` has gathered the parameters of ``unit`` already.

    If other hooks for saved tensors have been entered since that run began, it is ended, and its
    module does not keep parameters again. Such hooks may belong to a checkpoint, which calls the
    modules inside it again after the run has ended, and must find the same number of saved tensors
    as the first time.
    """
    for each in under_way():
        if not isinstance(each, KeptRun) or not unit.parameters:
            continue
        if id(unit.parameters[0].value) not in each.gathered:
            continue
        if not torch.is_grad_enabled() or not saved.others_in_use():
            return True
        each.unit.keeper = False
        each.end()
    return False


def _boxed(made: list[Gathering], arrived: Any, arriving: Any) -> list[Any]:
    """Return the gathered parameters as forward sees them.

    Args:
        made: the gatherings.
        arrived: the prefetched values of all of them; None to gather now.
        arriving: the function through which their gradients pass in backward.
    """
    check_mode.calling("gathered parameter")
    params, coders = [each.param for each in made], [each.coder for each in made]
    routes = [(each.src, each.dst) for each in made]
    if torch.is_inference_mode_enabled():  # tensors made there have no version counter
        with torch.inference_mode(False), torch.no_grad(), HookOff():
            wholes = arrived or gather_each([each.local for each in made], routes, coders)
    else:
        wholes = box_several(params, routes, arrived, arriving, coders)
    return [attach(x, each.dst) for x, each in zip(wholes, made, strict=True)]
