"""Install the hooks with which modules gather their parameters, as a plan's ``use`` says."""

from __future__ import annotations

from torch import nn

from ...dispatch.plans.shards import is_global
from ...movement.coders import Coder
from ..codecs import coder_of
from ..experts import parameters_of_lists
from ..module_calls import undo_on_raise
from ..plan import Plan
from .gathered import GatheredParameters, GatheredTogether
from .order import GatherOrders, GatherUnit, ShardedParameter
from .prefetch import choose_prefetch


def install_use(module: nn.Module, plan: Plan) -> None:
    """Make the modules inside ``module`` gather their parameters while they run.

    A parameter is gathered by the module that owns it. A tied parameter is gathered by the
    innermost module that contains all of its owners, once for all of its uses.

    Args:
        module: a module whose parameters are global tensors.
        plan: the plan, whose ``use`` is the layout in which forward and backward see a parameter.
            Parameters that are used in the layout in which they are stored are left alone.
    """
    runners: dict[nn.Module, list[ShardedParameter]] = {}
    for places in _places(module, plan):
        runner = _gathering_module(module, [name for name, _ in places])
        runners.setdefault(runner, []).extend(each for _, each in places)
    if not runners:
        return
    parameters = [each for group in runners.values() for each in group]
    together = GatheredTogether(tuple(parameters))
    # The order of hooks matters: the whole module's gather begins before those of the modules
    # inside it and ends after them, even where ``module`` itself is one of these.
    if is_small := _gathered_bytes(parameters) <= plan.keep_bytes:
        module.register_forward_pre_hook(together.before_forward)
    orders = _install_orders(module, parameters[0])
    for runner, group in runners.items():
        _install_gather(runner, group, orders)
    if is_small:
        module.register_forward_hook(together.after_forward)
        undo_on_raise(module)


def coders_of(module: nn.Module) -> list[Coder]:
    """Return the codecs of the parameters that ``module`` gathers when it is called.

    Only parameters that the hooks of ``module`` gather count, not those that submodules gather.
    """
    hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    gathered = [hook for hook in hooks if isinstance(hook, GatherUnit)]
    coders = [each.begun_coder() for hook in gathered for each in hook.parameters]
    return list(dict.fromkeys(coder for coder in coders if coder is not None))


def _install_orders(module: nn.Module, parameter: ShardedParameter) -> GatherOrders | None:
    """Return the gather orders by which ``module`` prefetches; None if ranks cannot prefetch.

    Also installs a forward pre-hook, which restarts the forward order at each call of ``module``.

    Args:
        module: the whole module.
        parameter: any of its sharded parameters, for the placement.
    """
    sending = choose_prefetch(parameter.value.placement)
    if sending is None:
        return None
    orders = GatherOrders(sending)
    module.register_forward_pre_hook(orders.begin_forward)
    return orders


def _gathered_bytes(parameters: list[ShardedParameter]) -> int:
    """Return the bytes of all gathered parameters, on the rank that holds most of each.

    It is the same number on every rank. A tied parameter counts once.
    """
    nbytes: dict[int, int] = {}
    for place in parameters:
        param = place.value
        nbytes[id(param)] = param._spec.with_sbp(place.use).largest_nbytes
    return sum(nbytes.values())


def _places(module: nn.Module, plan: Plan) -> list[list[tuple[str, ShardedParameter]]]:
    """Return the places of each parameter that is used in another layout than stored.

    One list for each parameter, of (name, place); a tied parameter has several.
    """
    places_by_id: dict[int, list[tuple[str, ShardedParameter]]] = {}
    list_param_ids = parameters_of_lists(module)  # each expert gathers its own
    for name, param in module.named_parameters(remove_duplicate=False):
        layouts = None if id(param) in list_param_ids else plan.layouts(name)
        if is_global(param) and layouts is not None and layouts.use != param._spec.sbp:  # type: ignore[attr-defined]
            path, _, key = name.rpartition(".")
            places = places_by_id.setdefault(id(param), [])
            coder = places[0][1].coder if places else coder_of(param, layouts)
            owner = module.get_submodule(path)
            places.append((name, ShardedParameter(owner, key, layouts.use, coder)))
    return list(places_by_id.values())


def _gathering_module(module: nn.Module, names: list[str]) -> nn.Module:
    """Return the module that gathers a parameter: the innermost one that contains all its owners.

    A module without a forward of its own is passed over, since no hook of it would run.

    Args:
        module: the whole module.
        names: all names of the parameter.
    """
    paths = [name.split(".")[:-1] for name in names]
    path = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        path.append(level[0])
    while path:
        candidate, parent = (module.get_submodule(".".join(p)) for p in (path, path[:-1]))
        # nn.MultiheadAttention reads the weight of its output projection without calling it, so
        # hooks of the projection would not run.
        if _has_forward(candidate) and not isinstance(parent, nn.MultiheadAttention):
            return candidate
        path.pop()
    return module


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _install_gather(
    runner: nn.Module, parameters: list[ShardedParameter], orders: GatherOrders | None
) -> None:
    """Install hooks on ``runner`` that gather ``parameters``.

    If ``runner`` has such hooks for other parameters already, ``parameters`` are added to them.
    """
    for hook in runner._forward_pre_hooks.values():
        existing = getattr(hook, "__self__", None)
        if type(existing) is GatheredParameters:
            existing.parameters = tuple(dict.fromkeys([*existing.parameters, *parameters]))
            return
    gathered = GatheredParameters(tuple(parameters), orders)
    runner.register_forward_pre_hook(gathered.before_forward)
    runner.register_forward_hook(gathered.after_forward)
    undo_on_raise(runner)
