"""Plan mixtures of experts: experts divided among ranks, or each expert split by ``tensor``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

from ...spec import B, Split
from ..experts import ExpertList, count_of, expert_lists, on_its_rank, takes_routed
from ..experts.lists import NAMED
from ..plan import Border, Layouts, Plan
from .asked import Asked

_DOWN = frozenset("down_proj w2 wo down output_linear w2_weight".split())
_UP = frozenset("gate_up_proj gate_proj up_proj w1 w3 input_linear".split())


def stacked_experts(asked: Asked) -> Iterator[tuple[str, str, int]]:
    """Return the weights [E, ...] that hold all E experts of a module, one entry for each.

    Each is (first name of the tensor, its key in the module, number of experts):
    ``("h.0.experts.w1", "w1", 8)``. Tensors that were global before are left out, since they stay
    as they are.
    """
    for name, part in asked.module.named_modules():
        count = count_of(part)
        named = NAMED.search(name) or "Experts" in type(part).__name__
        for key, value in part._parameters.items():
            if value is not None and named and value.ndim >= 2 and value.shape[0] == count:
                first = asked.first_name(f"{name}.{key}")
                if first in asked.tensors:
                    yield first, key, value.shape[0]


def plan_expert(asked: Asked) -> Plan:
    """Return the plan ``"expert"``: experts are divided among ranks, and the rest is replicated.

    A stack of experts [E, ...] is S(0), and each expert in a list of modules is on one rank.
    """
    plan = Plan()
    for name, _, count in stacked_experts(asked):
        if count < asked.ranks:
            plan.notes.append(f"{name}: {count} experts on {asked.ranks} ranks are left whole")
        else:
            plan.tensors[name] = Layouts((Split(0),))
    _add_up_after(plan, asked, {n for n, p in asked.module.named_modules() if takes_routed(p)})
    for found in expert_lists(asked.module):
        _add_list(plan, asked, found)
    if not plan.tensors and not plan.notes:
        plan.notes.append("no experts were found: all is whole on every rank")
    return plan


def _add_list(plan: Plan, asked: Asked, found: ExpertList) -> None:
    """Add the layouts with which each expert of a list is on one rank, or a note why they are not.

    Args:
        plan: the plan, which is changed.
        asked: the module and the axis.
        found: the list.
    """
    count, keys = len(found.experts), found.keys
    names = [[asked.first_name(f"{found.name}.{e}.{key}") for key in keys] for e in found.experts]
    if count < asked.ranks:
        why = f"{count} experts on {asked.ranks} ranks are left whole"
    elif not found.selects:
        why = (
            f"{type(found.host).__name__}.forward seems to give each of these experts all tokens, "
            "so each rank has all of them; zero3 shards their weights, tensor splits each"
        )
    elif any(name not in asked.tensors for name in itertools.chain(*names)):
        why = "some of these experts are global already, so all stay as they are or are left whole"
    elif any(asked.split_by_others(name) for name in itertools.chain(*names)):
        why = "another axis splits these experts, so this one does not divide them"
    else:
        for e, tensors in enumerate(names):
            for name in tensors:
                size = asked.tensors[name].shape[0]
                plan.tensors[name] = Layouts((on_its_rank(size, e, count, asked.ranks),))
        return
    plan.notes.append(f"{found.name}: {why}")


def beside_experts(planner: Callable[[Asked], Plan]) -> Callable[[Asked], Plan]:
    """Return a planner that divides experts among ranks and plans all else with ``planner``.

    ``beside_experts(plan_zero3)`` is the plan ``"zero3+expert"``.
    """

    def plan(asked: Asked) -> Plan:
        experts, rest = plan_expert(asked), planner(asked)
        tensors = rest.tensors | experts.tensors
        return Plan(tensors, experts.modules, notes=[*experts.notes, *rest.notes])

    return plan


def split_experts_inside(plan: Plan, asked: Asked) -> None:
    """Add layouts to ``plan`` that split each expert over the ranks, for the plan ``"tensor"``.

    The last layer of an expert is split along its input, the others along their output. A weight
    fused with a gate is split, too: the op that separates both has to exchange pieces, but a whole
    gradient of all experts would cost more.
    """
    for name, key, _ in stacked_experts(asked):
        shape = asked.tensors[name].shape
        role = name.split(".")[-2] if key == "weight" else key
        dims = _features(asked, name)
        if len(shape) != 3 or role not in _DOWN | _UP:
            continue
        dim = dims[1] if role in _DOWN else dims[0]
        if shape[dim] % asked.ranks == 0:
            plan.tensors.setdefault(name, Layouts((Split(dim),)))
    _add_up_after(plan, asked)


def _add_up_after(plan: Plan, asked: Asked, but: Collection[str] = ()) -> None:
    """Make ``plan`` reduce the experts' partial sums to B at the output of each mixture of experts.

    Otherwise the next layers might run on pieces of the output, which would then be redistributed.

    Args:
        plan: the plan, which is changed.
        asked: the module and the axis.
        but: the names of modules of experts whose outputs are complete, since tokens are sent to
            the experts.
    """
    split = [name for name, _, _ in stacked_experts(asked) if name in plan.tensors]
    for name, part in asked.module.named_modules():
        inside = f"{name}.experts"
        if hasattr(part, "experts") and any(
            n.startswith(inside) for n in split if inside not in but
        ):
            plan.modules.setdefault(name, Border(outputs={0: (B,)}))


def _features(asked: Asked, name: str) -> tuple[int, int]:
    """Return the dims of a weight [E, ...] that are its layer's output and input.

    (1, 2) for [E, out, in], and (2, 1) for a module that says ``is_transposed``.
    """
    owner = asked.module.get_submodule(name.rpartition(".")[0])
    return (2, 1) if getattr(owner, "is_transposed", False) else (1, 2)
