"""A call that differs from an earlier one in sizes alone, in integers, floats or values: whatever
plan serves it, the results are those of plain torch.

Of each family some calls are made, in fixed turns; with ``CONSISTENT_TEST_ALL=1`` all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from consistent import Placement
from consistent.dispatch._C import PlanTable
from consistent.dispatch.plans.plan import use_plan_table
from tests.brute_force import Example
from tests.consistent.rules.layouts import (
    FAMILIES,
    changed,
    differs,
    examples,
    layouts,
    name_of,
    run,
    wanted,
)
from tests.ranks import ALL, simulate
from tests.torch_release import IS_2_13
from tests.twins import GRIDS, Laid

# About so many calls of each family: one of them takes some milliseconds.
CALLS = 200


def _longer(grow: Callable[[int], int]) -> Callable[[Any], Any]:
    """Tensors with each dim of more than one item longer, filled with about their own values: no
    two of them are equal where the order of equal ones would be open."""

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for d, n in enumerate(x.shape):
            if n > 1:
                x = x.index_select(d, torch.arange(grow(n)) % n)
        if not x.is_floating_point():
            return x.clone()
        order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))
        return x * (1 - 0.05 * order.view(x.shape) / max(x.numel(), 1))

    return one


def _reversed(x: Any) -> Any:
    return x.flip(tuple(range(x.ndim))) if isinstance(x, torch.Tensor) else x


def _integer(to: Callable[[int], int]) -> Callable[[Any], Any]:
    return lambda x: to(x) if type(x) is int else x


def _float(to: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: to(x) if type(x) is float else x


CHANGES: dict[str, Callable[[Any], Any]] = {
    "twice as long": _longer(lambda n: 2 * n),
    "longer by three": _longer(lambda n: n + 3),
    "other values": _reversed,
    "integers + 1": _integer(lambda n: n + 1),
    "integers 0": _integer(lambda n: 0),
    "integers negative": _integer(lambda n: -n),
    "floats inf": _float(lambda x: math.inf),
    "floats nan": _float(lambda x: math.nan),
    "floats 0": _float(lambda x: 0.0),
    "floats negative": _float(lambda x: -x),
}


# What must stay: sorted numbers and offsets, torch's enumeration of reductions, and numbers of
# which torch itself makes another thing in vectors than in single elements.
KEPT: tuple[tuple[str, str], ...] = (
    (
        "searchsorted bucketize embedding_bag _grouped_mm",
        "twice as long, longer by three, other values",
    ),
    *([] if IS_2_13 else [("embedding_bag", "integers + 1, integers negative")]),
    ("hardshrink_backward softshrink_backward", "floats nan"),
    ("cross_entropy_loss", "floats nan, floats negative, floats inf"),
)


def is_kept(case: Example, change: str) -> bool:
    """Whether ``change`` would make a call of ``case`` that torch leaves open."""
    name = name_of(case)
    is_loss = any(part in name for part in ("loss", "entropy", "kl_div"))
    if is_loss and change.startswith("integers"):
        return True
    return any(name in names.split() and change in kept.split(", ") for names, kept in KEPT)


def _changes(case: Example) -> Iterator[tuple[str, Example, Any]]:
    """(change, the changed case, what it gives) where torch takes it and it is another."""
    for name, change in CHANGES.items():
        other = changed(case, change)
        if is_kept(case, name) or (repr(other) == repr(case) and name != "other values"):
            continue
        want = wanted(other)
        if want is not None:
            yield name, other, want


@functools.cache  # the ranks share them
def _calls(family: str) -> list[tuple[Example, Any, list[tuple[str, Example, Any]]]]:
    """(case, layout, its changes), each of which is run three times."""
    found = []
    for case in examples(family):
        if wanted(case) is not None:
            others = list(_changes(case))
            found += [(case, layout, others) for layout in layouts(case)]
    total = sum(3 * len(others) for _, _, others in found)
    return found if ALL else found[:: max(1, math.ceil(total / CALLS))]


def _check(rank: int, ranks: Any, family: str) -> list[str]:
    placement, wrong = Placement("cpu", ranks), []
    for case, layout, others in _calls(family):
        with use_plan_table(PlanTable()):  # of this rank, which is a thread
            run(case, Laid(placement), layout)
            for time in ("first", "again", "a third time"):  # by the general plan, then by a copy
                found = [
                    (n, differs(other, Laid(placement), layout, want)) for n, other, want in others
                ]
                wrong += [f"{name}, {time}: {text}" for name, text in found if text]
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_of_another_size_or_number_gives_right_values(family: str) -> None:
    _calls(family)
    for wrong in simulate(_check, 2, GRIDS[2], family):
        assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])
