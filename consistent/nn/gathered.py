"""Parameters that lie in another layout than they are used in (ZeRO-3): they are gathered while the
module that owns them runs, and again in backward.

```
            before forward       forward      after it       backward                       after it
weight      S(0) -gather-> B     B            S(0)           S(0) -gather-> B, used, let go  S(0)
its grad                                                     P -reduce-scatter-> S(0)        S(0)
```

The module keeps the parameter that lies as S, and so do ``state_dict``, ``named_parameters`` and
optimizers at any moment. Forward reads ``self.weight``, and an entry of the module's ``__dict__``,
which Python looks at before torch's table of parameters, gives it the gathered one. Code that
reads a parameter elsewhere finds the global tensor that lies as S, with the same values.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dispatch.plans.shards import HookOff, attach, is_global, plain, rebox
from ..movement.differentiable import box
from ..movement.run import run
from ..spec import NdSbp, TensorSpec
from ..tensor.storage import memory
from . import saved_shards
from .gather_ahead import Orders, find, orders_on
from .plan import Plan
from .saved_shards import GatheredOnce, SavedShards, storage_of


class _Slot(NamedTuple):
    """A parameter's place in a module, and the layout that forward sees it in."""

    owner: nn.Module
    key: str
    use: NdSbp


def install_use(module: nn.Module, plan: Plan) -> None:
    """Let the modules inside ``module`` gather their parameters for as long as they run.

    A parameter is gathered by the module that owns it; one that several modules own (tied) by the
    innermost module that has them all inside, once for all of its uses.

    Args:
        module: a module whose parameters are global tensors.
        plan: says by ``use`` in which SBPs forward and backward see each parameter. Those that are
            used as they lie are left alone.
    """
    units: dict[nn.Module, list[_Slot]] = {}
    for places in _places(module, plan):
        runner = _runner(module, [name for name, _ in places])
        units.setdefault(runner, []).extend(slot for _, slot in places)
    orders = None
    if units:
        first = next(iter(units.values()))[0]
        orders = orders_on(first.owner._parameters[first.key].placement)  # type: ignore[union-attr]
        if orders is not None:
            module.register_forward_pre_hook(orders.begin_forward)
    for runner, slots in units.items():
        _install(runner, slots, orders)


def _places(module: nn.Module, plan: Plan) -> list[list[tuple[str, _Slot]]]:
    """The named places of each parameter that is used in another layout than it lies in."""
    found: dict[int, list[tuple[str, _Slot]]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        layouts = plan.layouts(name)
        if is_global(param) and layouts is not None and layouts.use != param._spec.sbp:  # type: ignore[attr-defined]
            path, _, key = name.rpartition(".")
            slot = _Slot(module.get_submodule(path), key, layouts.use)
            found.setdefault(id(param), []).append((name, slot))
    return list(found.values())


def _runner(module: nn.Module, names: list[str]) -> nn.Module:
    """The innermost module that has all of ``names`` inside, and a forward that calls them."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    while shared:
        found, around = (module.get_submodule(".".join(p)) for p in (shared, shared[:-1]))
        # Torch's attention reads its projection's weight without calling the projection.
        if _has_forward(found) and not isinstance(around, nn.MultiheadAttention):
            return found
        shared.pop()
    return module


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _install(runner: nn.Module, slots: list[_Slot], orders: Orders | None) -> None:
    for hook in runner._forward_pre_hooks.values():
        if isinstance(found := getattr(hook, "__self__", None), GatheredParameters):
            found.slots = tuple(dict.fromkeys([*found.slots, *slots]))
            return
    gathered = GatheredParameters(tuple(slots), orders)
    runner.register_forward_pre_hook(gathered.before_forward)
    runner.register_forward_hook(gathered.after_forward, always_call=True)


class GatheredParameters:
    """The parameters that are gathered while one module runs."""

    def __init__(self, slots: tuple[_Slot, ...], orders: Orders | None) -> None:
        self.slots, self.orders = slots, orders
        self._running: list[_Run] = []  # more than one where the module calls itself

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Gather."""
        run = _Run(self)
        self._running.append(run)
        run.begin()

    def parts(self) -> list[tuple[Tensor, TensorSpec, TensorSpec]]:
        """What is to be gathered: each (shard, its spec, the wanted spec)."""
        found = {}
        for owner, key, use in self.slots:
            param: Any = owner._parameters.get(key)
            if is_global(param) and param._spec.sbp != use:
                found[id(param)] = (plain(param).detach(), param._spec, param._spec.with_sbp(use))
        return list(found.values())

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let go. Forward may have raised, also before it began."""
        if self._running:
            self._running.pop().end()

    def __deepcopy__(self, memo: dict) -> GatheredParameters:
        memo[id(self)] = new = GatheredParameters((), self.orders)
        new.slots = copy.deepcopy(self.slots, memo)
        return new

    def __getstate__(self) -> dict:
        return {"slots": self.slots, "orders": self.orders, "_running": []}


class _Gathered(NamedTuple):
    """A parameter, its gathered values as forward sees them, and what was written into these."""

    param: Any
    whole: Any
    source: GatheredOnce
    version: int
    aliases: list[Any]
    storage: int


class _Run:
    """One run of a module's forward."""

    def __init__(self, unit: GatheredParameters) -> None:
        self.unit = unit
        self.hooks: SavedShards | None = None
        self.gathered: dict[int, _Gathered] = {}
        self.put: list[tuple[dict, str, Any, bool, Any]] = []

    def begin(self) -> None:
        if torch.is_grad_enabled():
            self.hooks = saved_shards.enter()
        order = None if self.unit.orders is None else self.unit.orders.in_forward()
        coming = None if order is None else order.arrived(self.unit)
        owners: dict[nn.Module, None] = {}
        for owner, key, use in self.unit.slots:
            param: Any = owner._parameters.get(key)
            if is_global(param) and param._spec.sbp != use:
                found = self.gathered.get(id(param)) or self._gather(param, use, coming)
                self._put(owner, key, found.whole)
                owners[owner] = None
        for owner in owners:
            if isinstance(owner, nn.RNNBase):
                weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
                self._put(owner, "_flat_weights", weights)
        following = None if order is None else order.expected(self.unit)
        if order is not None and following is not None:
            order.submit(self.unit, following, following.parts())

    def _gather(self, param: Any, use: NdSbp, coming: Any) -> _Gathered:
        target: TensorSpec = param._spec.with_sbp(use)
        source = GatheredOnce(param, target, self.unit.orders, (self.unit, len(self.gathered)))
        whole = _boxed(param, target, find(coming, source.local, target))
        if self.hooks is not None:
            self.hooks.add(plain(whole), source)
        storage = storage_of(plain(whole))
        made = _Gathered(param, whole, source, whole._version, [], storage)
        self.gathered[id(param)] = made
        _thread.aliases[storage] = made.aliases
        return made

    def _put(self, owner: nn.Module, key: str, value: Any) -> None:
        attributes = owner.__dict__
        self.put.append((attributes, key, value, key in attributes, attributes.get(key)))
        attributes[key] = value

    def end(self) -> None:
        for attributes, key, value, had, before in reversed(self.put):
            if attributes.get(key) is value:
                if had:
                    attributes[key] = before
                else:
                    del attributes[key]
        for each in self.gathered.values():
            _thread.aliases.pop(each.storage, None)
            if self.hooks is not None:
                self.hooks.drop(each.storage)
        if self.hooks is not None:
            saved_shards.leave(self.hooks)
        gathered, self.put, self.gathered = self.gathered, [], {}
        for each in gathered.values():
            _land(each)


def _boxed(param: Any, target: TensorSpec, arrived: Tensor | None) -> Any:
    if arrived is not None:
        return attach(box(param, param._spec, target, arrived=arrived), target)
    if torch.is_inference_mode_enabled():  # a tensor made there does not count writes into it
        with torch.inference_mode(False), torch.no_grad():
            return rebox(param, target, "the use of a gathered parameter")
    return rebox(param, target, "the use of a gathered parameter")


def _land(gathered: _Gathered) -> None:
    """What forward has written into the gathered values is written into the parameter: each rank
    keeps its part, and nothing is sent."""
    param, whole, source, version, aliases, _ = gathered
    if whole._version == version and not any(alias._version for alias in aliases):
        return
    with torch.no_grad(), HookOff():
        mine = run(plain(whole).detach(), whole._spec, param._spec)
        plain(param).detach().copy_(mine)
    source.wrote(whole._version)


class _Thread(threading.local):
    """By storage of the gathered values: what `.data` made of them, which counts writes by
    itself."""

    def __init__(self) -> None:
        self.aliases: dict[int, list[Any]] = {}


_thread = _Thread()


def _watch(alias: Any) -> None:
    if _thread.aliases:
        found = _thread.aliases.get(storage_of(plain(alias)))
        if found is not None:
            found.append(alias)


memory.watchers.append(_watch)
