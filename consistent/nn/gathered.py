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
from typing import Any

import torch
from torch import nn

from ..autograd.backward import passes
from ..dispatch.plans.shards import is_global, plain
from ..movement.coders import Coder
from .codecs import coder_of
from .gather_ahead import Orders, Wanted, orders_on
from .gather_run import KeptRun, OneByOne, Run, Slot, join_kept
from .module_calls import undo_on_raise
from .plan import Plan
from .saved_shards import innermost


def install_use(module: nn.Module, plan: Plan) -> None:
    """Let the modules inside ``module`` gather their parameters for as long as they run.

    A parameter is gathered by the module that owns it; one that several modules own (tied) by the
    innermost module that has them all inside, once for all of its uses.

    Args:
        module: a module whose parameters are global tensors.
        plan: says by ``use`` in which SBPs forward and backward see each parameter. Those that are
            used as they lie are left alone.
    """
    units: dict[nn.Module, list[Slot]] = {}
    for places in _places(module, plan):
        runner = _runner(module, [name for name, _ in places])
        units.setdefault(runner, []).extend(slot for _, slot in places)
    if not units:
        return
    slots = [slot for found in units.values() for slot in found]
    together = GatheredTogether(tuple(slots))
    if small := _gathered_bytes(slots) <= plan.keep_bytes:
        module.register_forward_pre_hook(together.before_forward)
    orders = _orders(module, slots[0])
    for runner, slots in units.items():
        _install(runner, slots, orders)
    if small:
        module.register_forward_hook(together.after_forward)
        undo_on_raise(module)


def coders_of(module: nn.Module) -> list[Coder]:
    """The codecs by which parameters are sent that ``module`` gathers when it is called."""
    hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    slots = [slot for hook in hooks if isinstance(hook, GatheredParameters) for slot in hook.slots]
    return list(dict.fromkeys(slot.coder for slot in slots if slot.coder is not None))


def _orders(module: nn.Module, slot: Slot) -> Orders | None:
    orders = orders_on(slot.owner._parameters[slot.key].placement)  # type: ignore[union-attr]
    if orders is not None:
        module.register_forward_pre_hook(orders.begin_forward)
    return orders


def _gathered_bytes(slots: list[Slot]) -> int:
    """Bytes of the largest shards that are gathered, as every rank counts them."""
    found: dict[int, int] = {}
    for owner, key, use, _ in slots:
        param: Any = owner._parameters[key]
        found[id(param)] = param._spec.with_sbp(use).largest_nbytes
    return sum(found.values())


def _places(module: nn.Module, plan: Plan) -> list[list[tuple[str, Slot]]]:
    """The named places of each parameter that is used in another layout than it lies in."""
    found: dict[int, list[tuple[str, Slot]]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        layouts = plan.layouts(name)
        if is_global(param) and layouts is not None and layouts.use != param._spec.sbp:  # type: ignore[attr-defined]
            path, _, key = name.rpartition(".")
            places = found.setdefault(id(param), [])
            coder = places[0][1].coder if places else coder_of(param, layouts)
            slot = Slot(module.get_submodule(path), key, layouts.use, coder)
            places.append((name, slot))
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


def _install(runner: nn.Module, slots: list[Slot], orders: Orders | None) -> None:
    for hook in runner._forward_pre_hooks.values():
        found = getattr(hook, "__self__", None)
        if type(found) is GatheredParameters:
            found.slots = tuple(dict.fromkeys([*found.slots, *slots]))
            return
    gathered = GatheredParameters(tuple(slots), orders)
    runner.register_forward_pre_hook(gathered.before_forward)
    runner.register_forward_hook(gathered.after_forward)
    undo_on_raise(runner)


class GatheredParameters:
    """The parameters that are gathered while one module runs."""

    def __init__(self, slots: tuple[Slot, ...], orders: Orders | None) -> None:
        self.slots, self.orders = slots, orders
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

    def parts(self) -> list[Wanted]:
        """What is to be gathered."""
        found: dict[int, Wanted] = {}
        for owner, key, use, coder in self.slots:
            param: Any = owner._parameters.get(key)
            if is_global(param) and param._spec.sbp != use:
                dst = param._spec.with_sbp(use)
                found[id(param)] = (plain(param).detach(), param._spec, dst, coder)
        return list(found.values())

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let go."""
        Run.end_of(self)

    def retire(self) -> None:
        """Gather nothing more: a graph that is still there would gather parameters ahead, which may
        be on other ranks now."""
        self.slots = ()

    def __deepcopy__(self, memo: dict) -> GatheredParameters:
        memo[id(self)] = new = type(self)((), self.orders)
        new.slots = copy.deepcopy(self.slots, memo)
        return new


class GatheredTogether(GatheredParameters):
    """All parameters of a module that are gathered when it is called: small ones, which are kept
    until its backward has ended.

    One call between two backward passes keeps them, so that many calls do not hold them many
    times. In the others, and where a program has hooks for saved tensors in use, as a checkpoint
    has, each module inside gathers its own.
    """

    def __init__(self, slots: tuple[Slot, ...], orders: Orders | None = None) -> None:
        super().__init__(slots, orders)
        self.keeper = True
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
        return self.keeper and self._kept_at != passes() and innermost() is None
