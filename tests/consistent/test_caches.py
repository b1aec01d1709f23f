"""Every table that lives as long as the process: what bounds it, and that sizes do not fill it."""

from __future__ import annotations

import ast
import collections.abc
import copy
import gc
import importlib
import pickle
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[2]

# Of a table, or of a cache without a limit of its own, what bounds it.
CODE = "by names that are written in the sources"
OPS = "by the ops and functions that torch has"
RANKS = "by groups of ranks"
OPEN = "what has been entered and not left, or listens"
OBJECTS = "an entry goes with its object"
BOUNDED = {
    "consistent.auto.machines.bytes_accessed._schema_arguments": OPS,
    "consistent.auto.machines.work._op_name": OPS,
    "consistent.auto.machines.work._packet_name": OPS,
    "consistent.auto.machines.work._works": "MAX_CACHED",
    "consistent.auto.machines.work.kind_of": OPS,
    "consistent.autograd.buckets._numbers": "by placements, axes and dtypes",
    "consistent.checkpoint.saving.owner._kept_marks": "a short word for each folder saved to",
    "consistent.checkpoint.saving.owner._owned_marks": "a short word for each folder saved to",
    "consistent.compiled.program._programs": OBJECTS,
    "consistent.compiled.reached._is_standard": "by modules of Python",
    "consistent.dispatch.planning.functions.call_rewrites.number_parameters": OPS,
    "consistent.dispatch.planning.functions.torch_functions._property_getters": OPS,
    "consistent.dispatch.plans.plan.handlers": CODE,
    "consistent.dispatch.plans.plan.list_ops": CODE,
    "consistent.dispatch.running.moved_views.alive": OBJECTS,
    "consistent.dispatch.running.writes._write_counts": "cleared with the last moved view",
    "consistent.flow.scope._placements": OPEN,
    "consistent.graph.known_values._is_random_op": OPS,
    "consistent.flow.scope._views": OPEN,
    "consistent.flow.session._runs": OPEN,
    "consistent.flow.session.loaded": "by names of variables",
    "consistent.flow.session.variables": "by names of variables",
    "consistent.forms.halo.halo.ON_FETCHED": CODE,
    "consistent.forms.random.plain_draws._scratch_generator": "by devices",
    "consistent.forms.refused.error_types": CODE,
    "consistent.forms.registry.FORMS": CODE,
    "consistent.forms.registry.RAISE_FIRST": CODE,
    "consistent.movement.check_mode._contexts_by_rank": "by ranks of this process",
    "consistent.movement.plain_values._comparison_counts": "by ops, layouts and dtypes, no sizes",
    "consistent.nn.same_object._checked_optimizers": OBJECTS,
    "consistent.rules.halo.halo.HALOS": CODE,
    "consistent.rules.notation.parse._interned_rules": CODE,
    "consistent.rules.notation.parse.parse": "by rules, and equations of einsum",
    "consistent.rules.table.ROWS": CODE,
    "consistent.spec.tensor_spec._interned": OBJECTS,
    "consistent.spec.tensor_spec._layouts": OBJECTS,
    "consistent.spec.tracer.op_tracers": OPEN,
    "consistent.tensor.inspection.answers.PARTS": CODE,
    "consistent.torch_patches.flexible._without_dynamo": "two functions of torch",
    "consistent.torch_patches.on_import._changes": CODE,
    "consistent.torch_patches.views_of_modules.views": CODE,
    "mirrored.background._spare_cores_cache": OBJECTS,
    "mirrored.transports.ordered._instances": OBJECTS,
    "mirrored.transports.side_stream._streams": "by devices",
    "mirrored.transports.torch_dist.groups._group_counts": RANKS,
    "mirrored.transports.torch_dist.groups._states": OBJECTS,
    "mirrored.transports.torch_dist.groups.new_group_callbacks": CODE,
    "mirrored.transports.torch_dist.short._free_buffers": RANKS,
}
_KINDS = ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "Counter", "OrderedDict", "deque")
_KINDS = (*_KINDS, "defaultdict", "dict", "set", "list")


def _modules() -> Iterator[tuple[str, str]]:
    for top in ("consistent", "mirrored"):
        for file in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), file.read_text()


def _is_empty_table(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name in _KINDS and not any(isinstance(a, ast.Call) for a in value.args)


def _has_no_limit(function: ast.FunctionDef) -> bool:
    """Whether it is cached without a limit; one without arguments has a single entry."""
    takes = function.args.args + function.args.kwonlyargs + function.args.posonlyargs
    texts = [ast.unparse(each).rpartition("functools.")[2] for each in function.decorator_list]
    return bool(takes) and bool({"cache", "lru_cache(None)", "lru_cache(maxsize=None)"} & {*texts})


def _found() -> list[str]:
    """Tables that modules make empty and fill later, and caches that have no limit."""
    found = []
    for module, text in _modules():
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty_table(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [f"{module}.{ast.unparse(each)}" for each in targets]
        for node in ast.walk(tree) if "cache" in text else ():
            if isinstance(node, ast.FunctionDef) and _has_no_limit(node):
                found.append(f"{module}.{node.name}")
    return found


def test_every_table_and_every_cache_without_a_limit_says_what_bounds_it() -> None:
    found = set(_found())
    assert len(found) > 40
    assert sorted(found - set(BOUNDED)) == [], "say in BOUNDED what bounds them"
    assert sorted(set(BOUNDED) - found) == []


# -- while sizes grow ------------------------------------------------------------------------------


def _sizes() -> dict[str, int]:
    """Entries of each table and cache of a module that is imported."""
    gc.collect()
    found = {}
    for name in BOUNDED:
        module, _, attribute = name.rpartition(".")
        table: Any = getattr(sys.modules.get(module), attribute, None)
        if hasattr(table, "cache_info"):
            found[name] = table.cache_info().currsize
        elif isinstance(table, collections.abc.Sized):
            found[name] = len(table)
    loader: Any = importlib.import_module("torch.fx.graph_module")
    found["sources of torch.fx"] = len(loader._loader.eval_cache)
    return found


def _limits() -> list[tuple[str, int, int]]:
    """(name, entries, most) of each cache that has a limit, and of the tables of plans."""
    from consistent.dispatch.plans.plan import plans

    # One table of plans for the sizes that they were made for, one of those that serve any size.
    found = [("plans", len(plans.values()), 2 * 4096)] if hasattr(plans, "values") else []
    for name, module in list(sys.modules.items()):
        if name.startswith(("consistent", "mirrored")):
            for key, value in list(vars(module).items()):
                info = value.cache_info() if hasattr(value, "cache_info") else None
                if getattr(info, "maxsize", None) is not None:  # torch's fake tensors have none
                    found.append((f"{name}.{key}", info.currsize, info.maxsize))
    return found


def _step(compiled: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11))
    model = consistent.parallelize(model, Placement.all("cpu"), "zero3")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optim.zero_grad()
        loss = F.cross_entropy(model(x * 1).flatten(0, 1), x.flatten())
        loss.backward()
        optim.step()
        return loss

    if not compiled:
        return step
    made = consistent.compile(step, backend="ops")
    made._max_programs = 3
    return made


def _words(n: int) -> Any:
    return consistent.distribute(torch.arange(4 * n).view(4, n) % 11, Placement.all("cpu"), S(0))


@on_ranks(1, 2)
def test_no_table_grows_with_sizes(rank: int) -> None:
    eager, compiled = _step(False), _step(True)
    for _ in range(3):
        compiled(_words(3))
    seen = []
    for first in (4, 10, 16):
        for n in range(first, first + 6):
            eager(_words(n))
            compiled(_words(n))
        seen.append(_sizes())
    assert len(compiled.programs) == 3 and all(each.why is None for each in compiled.programs)
    by_objects = {"consistent.spec.tensor_spec._interned"}  # of plans, which have a limit
    grown = {name for name in seen[1] if seen[2][name] > seen[1][name]} - by_objects
    assert grown == set(), [(name, [each.get(name) for each in seen]) for name in grown]
    limits = _limits()
    assert len(limits) > 20
    beyond = [each for each in limits if each[1] > each[2]]
    assert beyond == [], beyond


@on_ranks(2)
def test_a_program_keeps_no_argument(rank: int) -> None:
    step = consistent.compile(lambda x: x.square().sum(), backend="ops")
    for _ in range(4):
        x = _words(5).double()
        step(x)
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is None
    assert step.programs[-1].why is None


class Trainer:
    """A step that is a method."""

    def __init__(self) -> None:
        self.scale = 2.0

    @consistent.compile(backend="ops")
    def step(self, x: Any) -> Any:
        return (x * self.scale).sum()


@on_ranks(2)
def test_an_object_whose_step_was_compiled_goes(rank: int) -> None:
    trainer, x = Trainer(), _words(5).double()
    found = [trainer.step(x).item() for _ in range(4)]
    assert trainer.step is trainer.step and len(trainer.step.programs) == 1
    for made in (copy.copy(trainer), copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        made.scale = 3.0
        assert made.step is not trainer.step
        assert [made.step(x).item() for _ in range(3)] == [found[0] * 1.5] * 3
    assert trainer.step(x).item() == found[0]
    gone = weakref.ref(trainer)
    del trainer, made
    gc.collect()
    assert gone() is None
