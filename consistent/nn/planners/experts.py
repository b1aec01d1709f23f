"""Plan mixtures of experts: experts divided among ranks, or each expert split by ``tensor``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

from ...spec import B, Split
from ..experts import ExpertList, expert_count, expert_lists, sbp_on_one_rank, takes_routed_tokens
from ..experts.lists import EXPERTS_NAME
from ..plan import Border, Layouts, Plan
from .asked import PlanRequest

_DOWN = frozenset("down_proj w2 wo down output_linear w2_weight".split())
_UP = frozenset("gate_up_proj gate_proj up_proj w1 w3 input_linear".split())


def stacked_experts(request: PlanRequest) -> Iterator[tuple[str, str, int]]:
    """Return the weights [E, ...] that hold all E experts of a module, one entry for each.

    Each is (first name of the tensor, its key in the module, number of experts):
    ``("h.0.experts.w1", "w1", 8)``. Tensors that were global before are left out, since they stay
    as they are.
    """
    for name, part in request.module.named_modules():
        count = expert_count(part)
        is_named = EXPERTS_NAME.search(name) or "Experts" in type(part).__name__
        for key, value in part._parameters.items():
            if value is not None and is_named and value.ndim >= 2 and value.shape[0] == count:
                first = request.first_name(f"{name}.{key}")
                if first in request.tensors:
                    yield first, key, value.shape[0]


def plan_expert(request: PlanRequest) -> Plan:
    """Return the plan ``"expert"``: experts are divided among ranks, and the rest is replicated.

    A stack of experts [E, ...] is S(0), and each expert in a list of modules is on one rank.
    """
    plan = Plan()
    for name, _, count in stacked_experts(request):
        if count < request.ranks:
            plan.notes.append(f"{name}: {count} experts on {request.ranks} ranks are left whole")
        else:
            plan.tensors[name] = Layouts((Split(0),))
    _reduce_after_experts(
        plan, request, {n for n, p in request.module.named_modules() if takes_routed_tokens(p)}
    )
    for expert_list in expert_lists(request.module):
        _add_expert_list(plan, request, expert_list)
    if not plan.tensors and not plan.notes:
        plan.notes.append("no experts were found: all is whole on every rank")
    return plan


def _add_expert_list(plan: Plan, request: PlanRequest, experts: ExpertList) -> None:
    """Add the layouts with which each expert of a list is on one rank, or a note why they are not.

    Args:
        plan: the plan, which is changed.
        request: the module and the axis.
        experts: the list.
    """
    count, keys = len(experts.experts), experts.keys
    names = [
        [request.first_name(f"{experts.name}.{e}.{key}") for key in keys] for e in experts.experts
    ]
    if count < request.ranks:
        reason = f"{count} experts on {request.ranks} ranks are left whole"
    elif not experts.selects:
        reason = (
            f"{type(experts.host).__name__}.forward seems to give each of these experts all "
            "tokens, so each rank has all of them; zero3 shards their weights, tensor splits each"
        )
    elif any(name not in request.tensors for name in itertools.chain(*names)):
        reason = (
            "some of these experts are global already, so all stay as they are or are left whole"
        )
    elif any(request.split_by_others(name) for name in itertools.chain(*names)):
        reason = "another axis splits these experts, so this one does not divide them"
    else:
        for e, tensors in enumerate(names):
            for name in tensors:
                size = request.tensors[name].shape[0]
                plan.tensors[name] = Layouts((sbp_on_one_rank(size, e, count, request.ranks),))
        return
    plan.notes.append(f"{experts.name}: {reason}")


def with_divided_experts(planner: Callable[[PlanRequest], Plan]) -> Callable[[PlanRequest], Plan]:
    """Return a planner that divides experts among ranks and plans all else with ``planner``.

    ``with_divided_experts(plan_zero3)`` is the plan ``"zero3+expert"``.
    """

    def plan(request: PlanRequest) -> Plan:
        experts, rest = plan_expert(request), planner(request)
        tensors = rest.tensors | experts.tensors
        return Plan(tensors, experts.modules, notes=[*experts.notes, *rest.notes])

    return plan


def split_each_expert(plan: Plan, request: PlanRequest) -> None:
    """Add layouts to ``plan`` that split each expert over the ranks, for the plan ``"tensor"``.

    The last layer of an expert is split along its input, the others along their output. A weight
    fused with a gate is split, too: the op that separates both has to exchange parts of shards, but
    a whole gradient of all experts would cost more.
    """
    for name, key, _ in stacked_experts(request):
        shape = request.tensors[name].shape
        role = name.split(".")[-2] if key == "weight" else key
        dims = _feature_dims(request, name)
        if len(shape) != 3 or role not in _DOWN | _UP:
            continue
        dim = dims[1] if role in _DOWN else dims[0]
        if shape[dim] % request.ranks == 0:
            plan.tensors.setdefault(name, Layouts((Split(dim),)))
    _reduce_after_experts(plan, request)


def _reduce_after_experts(
    plan: Plan, request: PlanRequest, complete_names: Collection[str] = ()
) -> None:
    """Make ``plan`` reduce the experts' partial sums to B at the output of each mixture of experts.

    Otherwise the next layers might run on shards of the output, which would then be redistributed.

    Args:
        plan: the plan, which is changed.
        request: the module and the axis.
        complete_names: the names of modules of experts whose outputs are complete, since tokens
            are sent to the experts.
    """
    split = [name for name, _, _ in stacked_experts(request) if name in plan.tensors]
    for name, part in request.module.named_modules():
        prefix = f"{name}.experts"
        if hasattr(part, "experts") and any(
            n.startswith(prefix) for n in split if prefix not in complete_names
        ):
            plan.modules.setdefault(name, Border(outputs={0: (B,)}))


def _feature_dims(request: PlanRequest, name: str) -> tuple[int, int]:
    """Return the dims of a weight [E, ...] that are its layer's output and input.

    (1, 2) for [E, out, in], and (2, 1) for a module that says ``is_transposed``.
    """
    owner = request.module.get_submodule(name.rpartition(".")[0])
    return (2, 1) if getattr(owner, "is_transposed", False) else (1, 2)
