"""Parameters that lie in another layout than they are used in (ZeRO-3): they are gathered while the
module that owns them runs, and again in backward.

```
            before forward       forward      after it       backward                       after it
weight      S(0) -gather-> B     B            S(0)           S(0) -gather-> B, used, let go  S(0)
its grad                                                     P -reduce-scatter-> S(0)        S(0)
```

If all of them are small together (``Plan.keep_bytes``) they are gathered when the whole module is
called, in one message, and autograd keeps what it saves of them until backward has ended:

```
            before the call     the call     after it        backward                       after it
weights     S(0) -gather-> B    B            S(0), B saved   B, used and let go             S(0)
their grads                                                  P -reduce-scatter-> S(0)       S(0)
```

The module keeps the parameter that lies as S, and so do ``state_dict``, ``named_parameters`` and
optimizers at any moment. Forward reads ``self.weight``, and an entry of the module's ``__dict__``,
which Python looks at before torch's table of parameters, gives it the gathered one. Code that
reads a parameter elsewhere finds the global tensor that lies as S, with the same values.
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
    """A parameter that lies split, by its place in a module; the layout that forward sees it in,
    and by what it is sent in fewer bytes, if it is."""

    owner: nn.Module
    key: str
    use: NdSbp
    coder: Coder | None = None

    @property
    def value(self) -> Any:
        """The parameter. One that was replaced since has another value here."""
        return self.owner._parameters.get(self.key)


class GatheredParameters:
    """The parameters that are gathered while one module runs, and its place in the orders in which
    they are prefetched."""

    def __init__(self, parameters: tuple[ShardedParameter, ...], orders: Orders | None) -> None:
        self.parameters, self.orders = parameters, orders
        # The positions of parameters that backward began with. They are kept from forward until
        # then: letting them go would save nothing, for backward gathers them before all else.
        self.opens_backward: set[int] = set()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Gather.

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
        """The parameters that are to be gathered, each once: with the spec that forward sees it in,
        and its codecs."""
        found: dict[int, tuple[Any, TensorSpec, Coder | None]] = {}
        for each in self.parameters:
            param = each.value
            if is_global(param) and param._spec.sbp != each.use:
                found.setdefault(id(param), (param, param._spec.with_sbp(each.use), each.coder))
        return list(found.values())

    def parts(self) -> list[Wanted]:
        """What is sent for when these parameters are prefetched."""
        return [(plain(x).detach(), x._spec, dst, coder) for x, dst, coder in self.wanted()]

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let go."""
        Run.end_of(self)

    def retire(self) -> None:
        """Gather nothing more: a graph that is still there would gather parameters ahead, which may
        be on other ranks now."""
        self.parameters = ()

    def __deepcopy__(self, memo: dict) -> GatheredParameters:
        memo[id(self)] = new = type(self)((), self.orders)
        new.parameters = copy.deepcopy(self.parameters, memo)
        return new


class GatheredTogether(GatheredParameters):
    """All parameters of a module that are gathered when it is called: small ones, which are kept
    until its backward has ended.

    One call between two backward passes keeps them, so that many calls do not hold them many
    times. In the others, and where a program has hooks for saved tensors in use, as a checkpoint
    has, each module inside gathers its own.
    """

    def __init__(
        self, parameters: tuple[ShardedParameter, ...], orders: Orders | None = None
    ) -> None:
        super().__init__(parameters, orders)
        self.keeper = True  # whether it may keep them
        self._kept_at = -1  # backward passes that had ended where a call last kept them

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
    """One run of a module's forward on gathered parameters, from ``begin`` to ``end``."""

    def __init__(self, unit: GatheredParameters) -> None:
        self.unit = unit
        self.hooks: saved.SavedShards | None = None
        self.gathered: dict[int, Gathering] = {}  # by the parameter's id
        self.put: list[tuple[dict, str, Any, bool, Any]] = []

    @staticmethod
    def end_of(unit: GatheredParameters) -> None:
        """End the innermost run of ``unit``, and those inside it."""
        found = under_way()
        if any(run.unit is unit for run in found):
            while True:
                ended = found.pop()
                ended.end()
                if ended.unit is unit:
                    return

    def begin(self) -> None:
        """Gather, and show forward what was gathered."""
        under_way().append(self)  # first, so that it is ended wherever this raises
        if torch.is_grad_enabled():
            self.hooks = saved.enter()
        order = None if self.unit.orders is None else self.unit.orders.in_forward()
        self._gather(None if order is None else order.arrived(self.unit))
        self._show()
        if order is not None:
            order.go_on(self.unit, lambda following: following.parts())

    def _show(self) -> None:
        """Let modules read what was gathered."""
        owners: dict[nn.Module, None] = {}
        for each in self.unit.parameters:
            found = self.gathered.get(id(each.value))
            if found is not None:
                self._put(each.owner, each.key, found.seen)
                owners[each.owner] = None
        for owner in owners:
            if isinstance(owner, nn.RNNBase):
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
        """Let go. Forward may have raised, and so may ``begin``."""
        for attributes, key, value, had, before in reversed(self.put):
            if attributes.get(key) is value:
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
    """One that gathers for the modules inside too, and whose values autograd keeps itself."""

    unit: GatheredTogether

    def __init__(self, unit: GatheredTogether) -> None:
        super().__init__(unit)
        # (shard, its writes) of parameters of which autograd has saved something.
        self.saved: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Gather, and show forward what was gathered: with a graph, for whom forward may switch
        gradients on inside."""
        under_way().append(self)
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            self._gather(None)
        self._show()

    def _release(self, each: Gathering) -> None:
        is_saved = torch._C._storage_Use_Count(each.storage) > 1  # not by what forward saw alone
        each.release()
        if is_saved:
            self.saved.append((each.local, each.local._version))

    def _arriving(self, *given: Any, **how: Any) -> Any:
        for shard, writes in self.saved:
            if shard._version != writes:
                raise modified(shard.shape, shard._version, writes)
        return arriving(*given, **how)


class OneByOne:
    """A call in which the modules inside gather for themselves."""

    def __init__(self, unit: GatheredTogether) -> None:
        self.unit = unit

    def begin(self) -> None:
        """So that ``Run.end_of`` finds this, and not a call around it."""
        under_way().append(self)

    def end(self) -> None:
        """There is nothing to let go."""


def join_kept(unit: GatheredParameters) -> bool:
    """Whether the parameters of ``unit`` are gathered, by a ``KeptRun`` that is under way. One that
    meets hooks for saved tensors that were not in use when it began is ended, and is the last of
    its module: a checkpoint calls the modules inside it again when the run has ended, and has to
    find as many tensors saved as the first time."""
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
    """The parameters as forward is to see them, of which ``arrived`` may be the values."""
    check_mode.calling("gathered parameter")
    params, coders = [each.param for each in made], [each.coder for each in made]
    routes = [(each.src, each.dst) for each in made]
    if torch.is_inference_mode_enabled():  # a tensor made there does not count writes into it
        with torch.inference_mode(False), torch.no_grad(), HookOff():
            wholes = arrived or gather_each([each.local for each in made], routes, coders)
    else:
        wholes = box_several(params, routes, arrived, arriving, coders)
    return [attach(x, each.dst) for x, each in zip(wholes, made, strict=True)]
