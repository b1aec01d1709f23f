"""Collectives in the background: in order, up to the first failure, and no thread stays."""

from __future__ import annotations

import threading

import pytest
import torch

from mirrored import background
from mirrored.background import BackgroundCalls, has_spare_cores
from mirrored.transports.default import current
from tests.ranks import pool, simulate


def _sums(rank: int) -> tuple[list[float], bool]:
    current().all_reduce(torch.ones(()), (0, 1))  # starts the thread that says where a rank is
    before = threading.active_count()
    with BackgroundCalls() as side:
        x = torch.ones((), requires_grad=True)
        given = [
            side.submit(lambda k: current().all_reduce(x * k, (0, 1)), rank + 10 * k)
            for k in range(4)
        ]
        found = [each.result() for each in given]
    assert not any(each.requires_grad for each in found)
    return [each.item() for each in found], threading.active_count() == before


def test_calls_go_in_order_and_the_thread_ends() -> None:
    for found, ended in pool(2).run(_sums):
        assert found == [1, 21, 41, 61] and ended


def _failing(rank: int) -> tuple[int, str]:
    calls = []

    def call(k: int) -> None:
        calls.append(k)
        current().all_reduce(torch.ones(()), (0, 1))
        if k == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as error, BackgroundCalls() as side:
        for each in [side.submit(call, k) for k in range(4)]:
            each.result()
    current().all_reduce(torch.ones(()), (0, 1))  # the ranks are still in step
    return len(calls), str(error.value)


def test_after_a_failure_none_is_begun() -> None:
    assert pool(2).run(_failing) == [(2, "no")] * 2


def test_a_failure_of_the_caller_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"), BackgroundCalls() as side:
        side.submit(int)
        raise ValueError("mine")
    assert threading.active_count() == before


def test_it_works_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
        with BackgroundCalls() as side:
            side.submit(x.add_, 1).result()
    assert x.tolist() == [1, 1]


def test_simulated_ranks_keep_their_transport() -> None:
    def rank_in_background(rank: int) -> int:
        with BackgroundCalls() as side:
            return side.submit(lambda: current().rank).result()

    assert simulate(rank_in_background, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("uses", "enough"),
    [
        ([("a", range(4), 1), ("a", range(4), 1)], True),
        ([("a", range(3), 1), ("a", range(3), 1)], False),
        ([("a", range(2), 1), ("a", range(2, 4), 1)], True),
        ([("a", range(1), 1), ("a", range(1, 8), 1)], False),
        ([("a", range(8), 4), ("a", range(8), 4)], False),
        ([("a", range(2), 1), ("b", range(2), 1)], True),
    ],
)
def test_a_core_is_spare_that_no_thread_of_a_rank_needs(uses: list, enough: bool) -> None:
    assert background._have_spare_cores([(host, frozenset(c), n) for host, c, n in uses]) is enough


def _asked(rank: int) -> tuple[bool, bool]:
    torch.set_num_threads(1 if rank else 1000)
    try:
        current_ = background._spare_cores_cache.pop(current(), None)
        first = has_spare_cores((0, 1))
        torch.set_num_threads(1)
        return first, has_spare_cores((0, 1))
    finally:
        torch.set_num_threads(1)
        background._spare_cores_cache.pop(current(), None)
        del current_


def test_all_ranks_get_one_answer_and_it_stays() -> None:
    assert pool(2).run(_asked) == [(False, False)] * 2
