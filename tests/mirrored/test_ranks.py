"""The helper that runs tests on ranks: it must report, and never hang."""

from __future__ import annotations

import os
import time

import pytest
import torch

import mirrored
from tests.ranks import RankError, pool, simulate


def identity(rank: int, *args: object, **kwargs: object) -> tuple:
    return rank, args, kwargs


@pytest.mark.parametrize("n", [1, 4])
def test_results_come_in_order_of_rank(n: int) -> None:
    assert pool(n).run(identity, 1, a=2) == [(r, (1,), {"a": 2}) for r in range(n)]
    assert simulate(identity, n, 1, a=2) == [(r, (1,), {"a": 2}) for r in range(n)]


def echo(rank: int, x: torch.Tensor) -> dict:
    return {"x": x, "random": torch.rand(1)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_tensors_travel_by_value(dtype: torch.dtype) -> None:
    for x in (torch.ones(2, 3).to(dtype).T, torch.zeros(()).to(dtype), torch.empty(0, 2).to(dtype)):
        for got in pool(2).run(echo, x):
            assert got["x"].dtype == dtype and torch.equal(got["x"], x)
    assert pool(2).run(echo, x)[0]["random"] == pool(2).run(echo, x)[1]["random"]


def all_fail(rank: int) -> None:
    raise ZeroDivisionError("by nothing")


def test_error_on_every_rank_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        pool(2).run(all_fail)


def one_fails(rank: int) -> str:
    if rank == 1:
        raise KeyError("lost")
    if rank == 0:
        mirrored.all_reduce(torch.ones(1), (0, 1))
    return "fine"


def test_stuck_ranks_are_shown_and_the_pool_starts_again() -> None:
    with pytest.raises(RankError) as caught:
        pool(3).run(one_fails)
    text = str(caught.value)
    assert "KeyError: 'lost'" in text and "returned 'fine'" in text
    assert "stuck in" in text and "in one_fails" in text
    assert pool(3).run(identity) == [(r, (), {}) for r in range(3)]


def sleep(rank: int, seconds: float) -> None:
    time.sleep(seconds)


def test_time_limit_of_a_call() -> None:
    with pytest.raises(RankError, match="in sleep"):
        pool(1).run(sleep, 30.0, timeout=0.5)


def leave(rank: int) -> None:
    os._exit(7)


def test_death_of_a_rank_is_reported() -> None:
    with pytest.raises(RankError, match="died, exit code 7"):
        pool(1).run(leave)


def test_local_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="Move it to the top of its file"):
        pool(1).run(lambda rank: rank)
