"""Where ranks have cores to spare, parameters are gathered before they are needed: the same values,
the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

import consistent
from consistent import Placement, S
from consistent.nn.sharded import prefetch
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, replace_current
from mirrored.transports.ordered import Ordered
from tests.consistent.nn.sharded import test_gathered as gathered
from tests.mirrored.kinds import over_gloo
from tests.ranks import in_turn, on_ranks, pool
from tests.twins import GRIDS, compare, randn


@contextmanager
def cores_to_spare() -> Iterator[None]:
    before = prefetch.has_spare_cores
    prefetch.has_spare_cores = lambda ranks: True  # type: ignore[assignment]
    try:
        with replace_current(current()):
            yield
    finally:
        prefetch.has_spare_cores = before


def _compare(rank: int, case: Callable[..., Any], ranks: Any, *args: Any) -> None:
    with cores_to_spare():
        gathered.both_ways(rank, case, ranks, *args)
        assert isinstance(current(), Ordered)


def _twice(at: Any, case: Callable[..., Any]) -> Any:
    return case(at), case(at)


# On other numbers of ranks than without cores to spare, in test_gathered.py.
@pytest.mark.parametrize("wrap", gathered.WRAPS)
def test_a_module_trains_as_it_does_alone(wrap: str) -> None:
    for world in in_turn(list(gathered.WRAPS).index(wrap) + 1):
        pool(world).run(_compare, gathered.trained, GRIDS[world], gathered.WRAPS[wrap])


SITUATIONS = [
    gathered.accumulated,
    gathered.twice_through_one_graph,
    gathered.gradients_of_gradients,
    gathered.without_gradients,
    gathered.part_of_the_gradients,
    gathered.copied,
    gathered.after_an_exception,
    gathered.stepping_within_backward,
    gathered.other_ways,
]


@pytest.mark.parametrize("case", SITUATIONS)
def test_in_every_situation(case: Callable[..., Any]) -> None:
    pool(2).run(_compare, _twice, GRIDS[2], case)


@on_ranks(2)
def test_all_but_the_first_is_gathered_ahead_once_the_order_is_known(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    with cores_to_spare():
        layers = [nn.Linear(8, 8) for _ in range(4)]
        model = consistent.parallelize(nn.Sequential(*layers), placement, gathered.ONE_BY_ONE)
        ahead = current()
        assert isinstance(ahead, Ordered)
        x = consistent.from_local(randn(3, 8).float(), placement, S(0)).requires_grad_()
        ahead.inner = counted = Counting(ahead.inner)
        sent, submitted = [], []
        submit = ahead.submit
        ahead.submit = lambda *given: submitted.append(1) or submit(*given)  # type: ignore[assignment]
        for _ in range(3):
            counted.clear()
            submitted.clear()
            model(x).sum().backward()
            sent.append((len(counted.calls), counted.bytes, len(submitted)))
    calls, bytes_, first = sent[0]
    assert first == 0 and sent[1] == sent[2]
    # Three layers in forward, the weights of three in backward. The last layer's
    # weight is kept for backward, which begins with it.
    assert sent[1] == (calls - 1, bytes_ - 8 * 8 * 4 // 2, 3 + 3)


# ---- by messages -------------------------------------------------------------------------------


def _by_messages(rank: int, case: Callable[..., Any], ranks: Any, *args: Any) -> None:
    compare(rank, case, ranks, *args)
    assert not isinstance(current(), Ordered)


@pytest.mark.parametrize("wrap", gathered.WRAPS)
def test_a_module_trains_over_messages(wrap: str) -> None:
    for world in in_turn(list(gathered.WRAPS).index(wrap)):
        pool(world).run(
            over_gloo, _by_messages, gathered.trained, GRIDS[world], gathered.WRAPS[wrap]
        )


@pytest.mark.parametrize("case", SITUATIONS)
def test_in_every_situation_over_messages(case: Callable[..., Any]) -> None:
    pool(2).run(over_gloo, _by_messages, _twice, GRIDS[2], case)


def _saved_and_loaded_with_cores(rank: int) -> None:
    with cores_to_spare():
        gathered.saved_and_loaded(rank)


def test_a_module_that_gathers_ahead_is_saved_and_loaded_whole() -> None:
    pool(2).run(over_gloo, gathered.saved_and_loaded)
    pool(2).run(_saved_and_loaded_with_cores)
