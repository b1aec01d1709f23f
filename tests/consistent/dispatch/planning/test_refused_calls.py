"""A call that torch refuses leaves nothing behind: the next good one is planned as if it had not
been."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import consistent
from consistent import B, Placement, S
from consistent.dispatch.plans.plan import clear_plans, plans
from tests.brute_force import Example
from tests.consistent.rules.layouts import (
    FAMILIES,
    changed,
    examples,
    layouts,
    name_of,
    run,
    tensors_of,
    wanted,
)
from tests.ranks import ALL, on_ranks, pool
from tests.torch_release import IS_2_13
from tests.twins import GRIDS, Laid, randn


def _refused(case: Example) -> Iterator[Example]:
    """Calls like ``case`` that torch refuses: an operand is shorter, or a number is wrong."""
    leaves = tree_leaves((case.args, case.kwargs))
    for i, leaf in enumerate(leaves):
        for wrong in _wrong(leaf):
            source = iter([*leaves[:i], wrong, *leaves[i + 1 :]])
            args, kwargs = tree_map(lambda _, s=source: next(s), (case.args, case.kwargs))
            other = Example(case.func, args, kwargs)
            if not IS_2_13 and name_of(case) == "embedding_bag" and type(leaf) is int:
                continue  # torch itself would write beside its memory
            if wanted(other) is None and _is_refused_without_values(other):
                yield other


def _is_refused_without_values(case: Example) -> bool:
    try:
        on_meta = changed(case, lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x)
        on_meta.func(*on_meta.args, **on_meta.kwargs)
    except NotImplementedError:
        return False
    except (RuntimeError, TypeError, ValueError, IndexError):
        return True
    except AssertionError:  # checks of torch's own meta forms
        return False
    return False


def _wrong(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [leaf[..., :-1]] if leaf.ndim and leaf.shape[-1] > 2 else []
    if type(leaf) is float:
        return [-1.5, 2.5]
    return [leaf + 17] if type(leaf) is int else []


def _layouts_of(value: Any) -> list[Any]:
    return [x._spec for x in tree_leaves(value) if isinstance(x, consistent.GlobalTensor)]


def _whole_plans() -> set[str]:
    return {repr(plan) for plan in plans.values() if plan.is_whole}


def _check(rank: int, ranks: Any, family: str) -> list[str]:
    placement, wrong = Placement("cpu", ranks), []
    for case in examples(family)[:: 1 if ALL else 10]:
        refused = list(_refused(case)) if wanted(case) is not None else []
        for layout in list(layouts(case))[:: max(1, len(tensors_of(case)))] if refused else ():
            clear_plans()
            alone = _layouts_of(run(case, Laid(placement), layout))
            known = _whole_plans()
            clear_plans()
            for other in refused:
                with contextlib.suppress(Exception):  # of some ops ours takes what torch refuses
                    run(other, Laid(placement), layout)
            after = _layouts_of(run(case, Laid(placement), layout))
            if after != alone or not _whole_plans() <= known:
                wrong.append(f"{case} {layout}: {after}, not {alone}; {_whole_plans() - known}")
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_good_call_after_refused_ones(family: str) -> None:
    for wrong in pool(2).run(_check, GRIDS[2], family, timeout=200.0):
        assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])


@on_ranks(2)
def test_random_numbers_stay_alike_after_a_refused_call(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    for name, bad in (("normal_", (0.0, -1.0)), ("exponential_", (-1.0,)), ("bernoulli_", (1.5,))):
        clear_plans()
        x = consistent.distribute(randn(4, 6), placement, S(0))
        y = consistent.distribute(randn(4, 6), placement, B)
        for each in (x, y):
            with pytest.raises(RuntimeError):
                getattr(each, name)(*bad)
        good = {"normal_": (0.0, 1.5), "exponential_": (1.5,), "bernoulli_": (0.5,)}[name]
        drawn = []
        for each in (x, y):
            torch.manual_seed(3)
            drawn.append(getattr(each, name)(*good).full())
        assert torch.equal(*drawn), name
