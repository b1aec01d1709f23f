from __future__ import annotations

import re

import pytest
import torch

import mirrored
from mirrored import current
from tests.ranks import simulate

RANKS = (0, 1, 2)


def test_error_on_one_rank_ends_all() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        mirrored.all_reduce(torch.ones(1), RANKS)

    with pytest.raises(KeyError, match="lost"):
        simulate(fn, 3)


def test_waiting_for_a_rank_that_has_returned_is_an_error() -> None:
    def fn(rank: int) -> None:
        if rank:
            mirrored.all_reduce(torch.ones(1), RANKS)

    with pytest.raises(RuntimeError, match="rank 0: has returned"):
        simulate(fn, 3)


def test_ranks_in_different_calls_are_named() -> None:
    def fn(rank: int) -> None:
        if rank:
            mirrored.all_reduce(torch.ones(1), (0, 1))
        else:
            mirrored.broadcast(torch.ones(1), (1,), torch.float32, "cpu", 0, (0, 1))

    with pytest.raises(RuntimeError, match="must make the same calls in the same order") as said:
        simulate(fn, 2)
    for rank, line in enumerate((5, 3)):
        at = fn.__code__.co_firstlineno + line - 1
        assert re.search(f"    rank {rank}: .*{__file__}:{at} in fn\n", str(said.value))


def test_circular_waiting_is_an_error() -> None:
    def fn(rank: int) -> None:
        left = (rank - 1) % 3
        got = current().exchange([], [(left, (1,), torch.float32)], RANKS)
        current().exchange([((rank + 1) % 3, got[0])], [], RANKS)

    with pytest.raises(RuntimeError, match="messages that nobody will send"):
        simulate(fn, 3)


def test_shapes_that_disagree_are_an_error() -> None:
    def fn(rank: int) -> None:
        current().exchange([(1 - rank, torch.ones(2))], [(1 - rank, (3,), torch.float32)], (0, 1))

    with pytest.raises(RuntimeError, match=r"expects torch.float32 \(3,\) and gets"):
        simulate(fn, 2)
