from __future__ import annotations

import math
import tempfile

import pytest
import torch
import torch.distributed as dist

import mirrored
from mirrored.reduction import ordered_reduce
from mirrored.transports.default import current
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


def test_messages_need_no_process_group_of_their_ranks() -> None:
    pool(3).close()
    assert pool(3).run(over_gloo, subgroups) == [0, 0, 0]


def sums_over(rank: int, groups: list[tuple[int, ...]]) -> list[float]:
    big = torch.ones(200_000)
    return [mirrored.all_reduce(big, ranks)[0].item() for ranks in groups if rank in ranks]


def test_each_pair_of_ranks_sums_alone() -> None:
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


def sums_in_the_order_of_ranks(rank: int, n: int) -> None:
    ranks = tuple(range(n))
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool):
        for count in (1, 7, 70_001):  # in one round of messages, and in two
            made = torch.Generator().manual_seed(0)
            each = [(torch.randn(count, generator=made) * 10).to(dtype) for _ in ranks]
            given = each[rank].clone()
            found = [mirrored.all_reduce(given, ranks)]
            found.append(current().all_reduce_async(given.clone(), ranks).wait())
            wanted = ordered_reduce(each)
            assert all(torch.equal(x, wanted) for x in found), (dtype, count)
            assert torch.equal(given, each[rank])
    started = [current().all_reduce_async(torch.full((90_000,), k + rank), ranks) for k in range(4)]
    for k, handle in enumerate(started):
        assert handle.wait().unique().tolist() == [n * k + sum(ranks)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_have_the_bits_of_the_order_of_ranks(n: int) -> None:
    pool(n).run(over_gloo, sums_in_the_order_of_ranks, n)


def several_at_once(rank: int, n: int) -> None:
    ranks, sizes = tuple(range(n)), [3] + [2] * (n - 1)
    shapes = [(sum(sizes), 5), (4, sum(sizes)), (sum(sizes), 20_000), (sum(sizes),)]
    dims = [0, 1, 0, 0]
    wholes = [torch.arange(math.prod(shape)).view(shape).float() for shape in shapes]
    cut = [x.split(sizes, dim) for x, dim in zip(wholes, dims)]
    transport, all_sizes = current(), [sizes] * len(dims)
    going = [parts[rank] for parts in cut]
    joined = transport.start_all_gather_several(going, dims, all_sizes, ranks)
    summed = transport.start_reduce_scatter_several(wholes, dims, all_sizes, ranks)
    for x, wanted in zip(summed.wait(), cut, strict=True):  # not in the order of their start
        assert torch.equal(x, n * wanted[rank])
    for x, wanted in zip(joined.wait(), wholes, strict=True):
        assert torch.equal(x, wanted)
    places = [torch.empty_like(x) for x in wholes]
    made = transport.all_gather_several(going, dims, all_sizes, ranks, places)
    assert all(x is place and torch.equal(x, y) for x, place, y in zip(made, places, wholes))


@pytest.mark.parametrize("n", [2, 3])
def test_several_tensors_travel_at_once(n: int) -> None:
    pool(n).run(over_gloo, several_at_once, n)
