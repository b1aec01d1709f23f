"""One run of a module's forward on gathered parameters."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..autograd.unsummed import arriving
from ..dispatch.plans.shards import HookOff, attach, is_global, plain
from ..movement import check_mode
from ..movement.boxed import box_several
from ..movement.coded import gather_each
from ..movement.coders import Coder
from ..movement.run import run
from ..spec import NdSbp, TensorSpec
from ..spec.tracer import Tracer
from . import saved_shards
from .gather_ahead import Orders, Wanted, find
from .module_calls import under_way
from .saved_shards import GatheredOnce, SavedShards, storage_of


class Slot(NamedTuple):
    """A parameter's place in a module, the layout that forward sees it in, and by what it is sent
    in fewer bytes, if it is."""

    owner: nn.Module
    key: str
    use: NdSbp
    coder: Coder | None = None


class Unit(Protocol):
    """The parameters that are gathered while one module runs, and its place in the orders."""

    slots: tuple[Slot, ...]
    orders: Orders | None
    opens_backward: set[int]

    def parts(self) -> list[Wanted]: ...


class Keeper(Unit, Protocol):
    """A unit that gathers for the modules inside too."""

    keeper: bool  # whether it may


class _Gathered(NamedTuple):
    """A parameter, its gathered values as forward sees them, and what was written into these."""

    param: Any
    whole: Any
    source: GatheredOnce
    version: int
    aliases: list[Any]
    storage: int


class Run:
    """One run of a module's forward, from ``begin`` to ``end``."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.hooks: SavedShards | None = None
        self.gathered: dict[int, _Gathered] = {}
        self.put: list[tuple[dict, str, Any, bool, Any]] = []

    @staticmethod
    def end_of(unit: Unit) -> None:
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
            self.hooks = saved_shards.enter()
        order = None if self.unit.orders is None else self.unit.orders.in_forward()
        self._gather(None if order is None else order.arrived(self.unit))
        self._show()
        if order is not None:
            order.go_on(self.unit, lambda following: following.parts())

    def _show(self) -> None:
        """Let modules read what was gathered."""
        owners: dict[nn.Module, None] = {}
        for owner, key, *_ in self.unit.slots:
            found = self.gathered.get(id(owner._parameters.get(key)))
            if found is not None:
                self._put(owner, key, found.whole)
                owners[owner] = None
        for owner in owners:
            if isinstance(owner, nn.RNNBase):
                weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
                self._put(owner, "_flat_weights", weights)

    def _gather(self, coming: Any) -> None:
        found = self._found()
        if not found:
            return
        params, targets, coders = zip(*found, strict=True)
        sources = self._sources(found)
        arrived = [find(coming, x.local, target) for x, target in zip(sources, targets)]
        given = arrived if all(x is not None for x in arrived) else None
        wholes = _boxed(params, targets, coders, given, self._arriving)
        for param, whole, source in zip(params, wholes, sources, strict=True):
            self._enter(param, whole, source)

    def _found(self) -> list[tuple[Any, TensorSpec, Coder | None]]:
        """The parameters that are to be gathered, each with the wanted spec and its codecs."""
        found: dict[int, tuple[Any, TensorSpec, Coder | None]] = {}
        for owner, key, use, coder in self.unit.slots:
            param: Any = owner._parameters.get(key)
            if is_global(param) and param._spec.sbp != use:
                found.setdefault(id(param), (param, param._spec.with_sbp(use), coder))
        return list(found.values())

    def _sources(self, found: Any) -> list[GatheredOnce]:
        return [
            GatheredOnce(param, target, coder, self.unit.orders, (self.unit, position))
            for position, (param, target, coder) in enumerate(found)
        ]

    _arriving = staticmethod(arriving)

    def _enter(self, param: Any, whole: Any, source: GatheredOnce) -> None:
        position = len(self.gathered)
        if self.hooks is not None:
            self.hooks.add(whole, source)
            if position in self.unit.opens_backward:
                source.whole = plain(whole).detach()
        storage = storage_of(plain(whole))
        made = _Gathered(param, whole, source, whole._version, [], storage)
        self.gathered[id(param)] = made
        _thread.aliases[storage] = made.aliases

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
        for each in self.gathered.values():
            _thread.aliases.pop(each.storage, None)
            if self.hooks is not None:
                self.hooks.drop(each.storage)
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            saved_shards.leave(hooks)
        gathered, self.put, self.gathered = self.gathered, [], {}
        self._let_go(gathered)

    def _let_go(self, gathered: dict[int, _Gathered]) -> None:
        for each in gathered.values():
            if _land(each):
                each.source.wrote(each.whole._version)


class KeptRun(Run):
    """One that gathers for the modules inside too, and whose values autograd keeps itself."""

    unit: Keeper

    def __init__(self, unit: Keeper) -> None:
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

    def _let_go(self, gathered: dict[int, _Gathered]) -> None:
        super()._let_go(gathered)
        for each in gathered.values():
            if torch._C._storage_Use_Count(each.storage) > 1:
                self.saved.append((each.source.local, each.source.local._version))

    def _arriving(self, *given: Any, **how: Any) -> Any:
        for shard, writes in self.saved:
            if shard._version != writes:
                raise saved_shards.modified(shard.shape, shard._version, writes)
        return arriving(*given, **how)


class OneByOne:
    """A call in which the modules inside gather for themselves."""

    def __init__(self, unit: Keeper) -> None:
        self.unit = unit

    def begin(self) -> None:
        """So that ``Run.end_of`` finds this, and not a call around it."""
        under_way().append(self)

    def end(self) -> None:
        """There is nothing to let go."""


def join_kept(unit: Unit) -> bool:
    """Whether the parameters of ``unit`` are gathered, by a ``KeptRun`` that is under way. One that
    meets hooks for saved tensors that were not in use when it began is ended, and is the last of
    its module: a checkpoint calls the modules inside it again when the run has ended, and has to
    find as many tensors saved as the first time."""
    for each in under_way():
        if not isinstance(each, KeptRun) or not unit.slots:
            continue
        owner, key, *_ = unit.slots[0]
        if id(owner._parameters.get(key)) not in each.gathered:
            continue
        if not torch.is_grad_enabled() or not saved_shards.others_in_use():
            return True
        each.unit.keeper = False
        each.end()
    return False


def _boxed(params: Any, targets: Any, coders: Any, arrived: Any, arriving: Any) -> list[Any]:
    """``params`` as global tensors with the specs ``targets``, of which ``arrived`` may be the
    values."""
    check_mode.calling("gathered parameter")
    routes = [(param._spec, target) for param, target in zip(params, targets, strict=True)]
    if torch.is_inference_mode_enabled():  # a tensor made there does not count writes into it
        with torch.inference_mode(False), torch.no_grad(), HookOff():
            made = arrived or gather_each([torch.Tensor.detach(x) for x in params], routes, coders)
    else:
        made = box_several(params, routes, arrived, arriving, coders)
    return [attach(x, target) for x, target in zip(made, targets, strict=True)]


def _land(gathered: _Gathered) -> bool:
    """What forward has written into the gathered values is written into the parameter: each rank
    keeps its part, and nothing is sent. Whether there was anything."""
    param, whole, _, version, aliases, _ = gathered
    if whole._version == version and not any(alias._version for alias in aliases):
        return False
    with torch.no_grad(), HookOff():
        mine = run(plain(whole).detach(), whole._spec, param._spec)
        plain(param).detach().copy_(mine)
    return True


class _Thread(threading.local):
    """The aliases that `.data` made of gathered values, by their storage; each counts writes by
    itself."""

    def __init__(self) -> None:
        self.aliases: dict[int, list[Any]] = {}


_thread = _Thread()


def _watch(alias: Any) -> None:
    if _thread.aliases:
        found = _thread.aliases.get(storage_of(plain(alias)))
        if found is not None:
            found.append(alias)


Tracer(on_data=_watch).always()
