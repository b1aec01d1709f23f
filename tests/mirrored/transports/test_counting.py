from __future__ import annotations

import torch

import mirrored
from mirrored import counting, current
from tests.mirrored.kinds import everywhere, run
from tests.ranks import simulate

RANKS = (0, 1, 2)


def count_all(rank: int) -> list[tuple[str, int]]:
    x = torch.ones(4)
    with counting() as log:
        mirrored.all_reduce(x, RANKS)
        mirrored.all_gather(x[: rank + 1], 0, [1, 2, 3], RANKS)
        mirrored.reduce_scatter(x, 0, [1, 1, 2], RANKS)
        mirrored.broadcast(x if rank == 0 else None, (4,), x.dtype, "cpu", 0, RANKS)
        here = ((rank + 1) % 3, x), (rank, x)
        there = ((rank - 1) % 3, (4,), x.dtype), (rank, (4,), x.dtype)
        current().exchange(here, there, RANKS)
    mirrored.all_reduce(x, RANKS)
    assert log.bytes == sum(call.bytes for call in log.calls)
    return [(call.name, call.bytes) for call in log.calls]


@everywhere
def test_counting_gives_the_bytes_each_rank_sends(where: str) -> None:
    for rank, calls in enumerate(run(where, count_all, 3)):
        assert calls == [
            ("all_reduce", 22),  # ceil(2 * 2/3 * 16)
            ("all_gather", 2 * 4 * (rank + 1)),
            ("all_to_all", (12, 12, 8)[rank]),
            ("broadcast", (32, 0, 0)[rank]),
            ("exchange", 16),
        ]


def test_one_rank_sends_nothing() -> None:
    with counting() as log:
        mirrored.all_reduce(torch.ones(4), (0,))
        mirrored.all_gather(torch.ones(4), 0, [4], (0,))
    assert log.calls == []


def test_each_simulated_rank_counts_for_itself() -> None:
    def one(rank: int) -> list[str]:
        with counting() as log:
            mirrored.all_reduce(torch.ones(rank), (0, 1)[: 1 + rank] if rank else (0,), "max")
        return log.names

    assert simulate(one, 1) == [[]]
