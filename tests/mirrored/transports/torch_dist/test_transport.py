from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import mirrored
from mirrored.transports.torch_dist import TorchDist, groups
from mirrored.transports.torch_dist.groups import world
from tests.mirrored.kinds import over_gloo
from tests.ranks import pool


def subgroups(rank: int) -> int:
    big = torch.ones(200_000)
    for ranks in [(0, 1), (1, 0), (0, 1), (2, 1, 0)]:
        if rank in ranks:
            mirrored.all_reduce(big, ranks)
    return len(world().groups)


def test_one_process_group_serves_every_order_of_its_ranks() -> None:
    pool(3).close()
    assert pool(3).run(over_gloo, subgroups) == [1, 1, 0]  # the whole world is the default group


def sums_over(rank: int, groups: list[tuple[int, ...]]) -> list[float]:
    big = torch.ones(200_000)
    return [mirrored.all_reduce(big, ranks)[0].item() for ranks in groups if rank in ranks]


def test_groups_may_be_made_in_any_number_by_each_rank() -> None:
    # Rank 2 has one more group than rank 0 when they make theirs.
    assert pool(3).run(over_gloo, sums_over, [(2, 1), (2, 0), (0, 1)]) == [[2, 2]] * 3


def timeout(rank: int) -> float:
    return groups.timeout("cpu").total_seconds()


def test_groups_wait_as_long_as_the_default_group() -> None:
    assert pool(2).run(timeout) == [30.0, 30.0]


def begin_again(rank: int, file: str) -> list[float]:
    big, sums = torch.ones(200_000), []
    for k in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{file}{k}", rank=rank, world_size=2)
        sums.append(mirrored.all_reduce(big, (1, 0))[0].item())
    return sums


def test_transport_follows_a_new_default_group() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert pool(2).run(over_gloo, begin_again, folder + "/store") == [[2.0, 2.0]] * 2
    pool(2).close()


def staged(rank: int) -> list[float]:
    x = torch.full((70_000,), float(rank), device="cuda")
    small = mirrored.all_reduce(x[:1], (0, 1))
    parts = mirrored.all_gather(x[:1], 0, [1, 1], (0, 1))
    sent = mirrored.broadcast(x[:1], (1,), x.dtype, "cuda", 1, (0, 1))
    return [*mirrored.all_reduce(x, (0, 1))[:1], *small, *parts, *sent]


@pytest.mark.gpu
def test_cuda_tensors_are_staged_where_there_is_only_gloo() -> None:
    assert [[x.item() for x in row] for row in pool(2).run(staged)] == [[1, 1, 0, 1, 1]] * 2


def only_nccl(rank: int, file: str) -> list[int]:
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=0, world_size=1)
    t, x = TorchDist(), torch.arange(3, device="cuda")
    out = torch.empty_like(x)
    t._all_gather(x, [out], (0,))
    t._all_to_all([x + 1], [out], (0,))
    t._broadcast(out, 0, (0,))
    return t._reduce(out, (0,), "sum").wait().tolist()


@pytest.mark.gpu
def test_nccl_moves_bytes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert pool(1).run(only_nccl, folder + "/store") == [[1, 2, 3]]
    pool(1).close()


def extremes_of(rank: int, n: int) -> list[int]:
    x = torch.full((n,), float(rank))
    x[rank] = float("nan")
    return [int(mirrored.all_reduce(x, (0, 1, 2), op).isnan().sum()) for op in ("max", "min")]


@pytest.mark.parametrize("n", [5, 200_003], ids=["small", "large"])
def test_not_a_number_wins_on_every_rank(n: int) -> None:
    assert pool(3).run(extremes_of, n) == [[3, 3]] * 3
