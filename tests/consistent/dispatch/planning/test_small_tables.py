"""Random calls in random order and modes, with tables of eight plans: plans come and go all the
time, and the values stay those of plain torch."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import consistent
from consistent import Placement, S
from consistent.dispatch import _C
from consistent.dispatch.plans.plan import use_plan_table
from tests.brute_force import Example
from tests.consistent.dispatch.planning.test_any_size import CHANGES, is_kept
from tests.consistent.rules.layouts import FAMILIES, changed, differs, examples, layouts, wanted
from tests.ranks import on_ranks, simulate
from tests.twins import GRIDS, Laid

CALLS = 300
MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "forward-mode": torch.autograd.forward_ad.dual_level,
}


@contextlib.contextmanager
def _tables_of(most: int) -> Iterator[Any]:
    table = _C.PlanTable(False, most)
    with use_plan_table(table):
        yield table


def _cases(every: int) -> list[Example]:
    found = [case for family in FAMILIES for case in examples(family)[::every]]
    # Rows of a grouped product that belong to no group hold what memory held, on each rank its own.
    found = [case for case in found if getattr(case.func, "__name__", "") != "_grouped_mm"]
    return [case for case in found if wanted(case) is not None]


def _random_calls(ranks: Any, count: int, seed: int, cases: list[Example]) -> list[str]:
    """What differs; ranks draw the same calls."""
    draw, placement, wrong = random.Random(seed), Placement("cpu", ranks), []
    few = draw.sample(cases, 40)
    for _ in range(count):
        # Some come back soon, so that plans are copied for their sizes, and some never.
        case = draw.choice(few if draw.random() < 0.7 else cases)
        change = draw.choice(list(CHANGES))
        if draw.random() < 0.6 and not is_kept(case, change):
            case = changed(case, CHANGES[change])
        layout, mode = draw.choice(list(layouts(case)) or [()]), draw.choice(list(MODES))
        with MODES[mode]():
            want = wanted(case)
            text = "" if want is None else differs(case, Laid(placement), layout, want)
        if text:
            wrong.append(f"{mode}: {text}")
    return wrong


@on_ranks(2, 3, timeout=200.0)
@pytest.mark.filterwarnings("ignore")
def test_plans_that_make_room_for_others(rank: int) -> None:
    size = 2 if torch.distributed.get_world_size() == 2 else 3
    with _tables_of(8) as table:
        wrong = _random_calls(GRIDS[size], CALLS, seed=size, cases=_cases(4))
        assert max(table.counts) <= 8
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])


@on_ranks(1, timeout=200.0)
@pytest.mark.filterwarnings("ignore")
def test_threads_share_the_tables(rank: int) -> None:
    wrong: list[str] = []
    cases, interval = _cases(4), sys.getswitchinterval()
    table = _C.PlanTable(False, 8)

    def main(seed: int) -> None:
        with use_plan_table(table):
            wrong.extend(_random_calls([0], 150, seed, cases))

    threads = [threading.Thread(target=main, args=(seed,)) for seed in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])


_SIZED = (
    lambda x: torch.reshape(input=x, shape=(7, 2, 2)),
    lambda x: torch.ops.aten.view(x, [7, 2, 2]),
    lambda x: torch.ops.aten.expand(x.unsqueeze(1), [7, 3, 4]),
    lambda x: x.unsqueeze(1).expand(size=(7, 3, 4)),
    lambda x: torch.narrow(input=x, dim=0, start=1, length=5),
    lambda x: torch.ops.aten.slice(x, 0, 1, 5),
    lambda x: torch.unflatten(input=x, dim=1, sizes=(2, 2)),
)


def _on_uneven_shards(rank: int) -> list[Any]:
    placement = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.arange(28.0).view(7, 4), placement, S(0))
    return [call(x).full() for call in _SIZED for _ in range(2)]


def test_simulated_ranks_have_plans_of_their_own() -> None:
    """A plan knows the sizes of one rank's shard, and their threads share the hook."""
    x = torch.arange(28.0).view(7, 4)
    for found in simulate(_on_uneven_shards, 2):
        for given, expected in zip(found, [call(x) for call in _SIZED for _ in range(2)]):
            assert torch.equal(given, expected)
