from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mirrored
from tests.mirrored.kinds import SIZES, everywhere, run


def world(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def reduce_own(rank: int, n: int, op: str) -> Tensor:
    return mirrored.all_reduce(torch.tensor([rank, -rank, 10**rank]), world(n), op)


@everywhere
@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_combines_elementwise(where: str, n: int) -> None:
    rows = torch.tensor([[r, -r, 10**r] for r in range(n)])
    expected = {"sum": rows.sum(0), "max": rows.amax(0), "min": rows.amin(0)}
    for op, result in expected.items():
        for got in run(where, reduce_own, n, n, op):
            assert torch.equal(got, result)


def reduce_large(rank: int, ranks: tuple[int, ...], dtype: torch.dtype, op: str) -> Tensor | None:
    # Above SMALL_ALL_REDUCE bytes, so that gloo reduces by itself; not contiguous.
    x = torch.full((600, 1000), rank % 2, dtype=dtype).T
    return mirrored.all_reduce(x, ranks, op)[::333, ::333].clone() if rank in ranks else None


DTYPES = [torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_all_reduce_knows_every_dtype(where: str, dtype: torch.dtype) -> None:
    rows = torch.tensor([0, 1, 0]).to(dtype)
    expected = rows.any() if dtype == torch.bool else rows.sum()
    for got in run(where, reduce_large, 3, (0, 1, 2), dtype, "sum"):
        assert got.dtype == dtype and (got == expected).all()


@everywhere
def test_all_reduce_of_a_subgroup_leaves_others_out(where: str) -> None:
    left, mid, right = run(where, reduce_large, 3, (2, 1), torch.float32, "max")
    assert left is None and (mid == 1).all() and torch.equal(mid, right)


def gather_rows(rank: int, ranks: tuple[int, ...], sizes: list[int], dim: int) -> Tensor | None:
    if rank not in ranks:
        return None
    shape = [2, 2]
    shape[dim] = sizes[ranks.index(rank)]
    return mirrored.all_gather(torch.full(shape, rank), dim, sizes, ranks)


@everywhere
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_uneven_and_empty_pieces_in_the_order_of_ranks(
    where: str, dim: int
) -> None:
    for ranks, sizes in [((0, 1, 2), [2, 0, 1]), ((2, 0, 1), [1, 1, 1]), ((2, 1), [0, 3])]:
        line = [rank for rank, size in zip(ranks, sizes, strict=True) for _ in range(size)]
        expected = torch.tensor([line, line])
        results = run(where, gather_rows, 3, ranks, sizes, dim)
        for rank in ranks:
            assert torch.equal(results[rank], expected if dim else expected.T)


@everywhere
def test_all_gather_of_nothing_is_empty(where: str) -> None:
    for got in run(where, gather_rows, 3, (0, 1, 2), [0, 0, 0], 0):
        assert got.shape == (0, 2)


def scatter_sum(rank: int, ranks: tuple[int, ...], sizes: list[int]) -> Tensor | None:
    if rank not in ranks:
        return None
    x = torch.arange(float(sum(sizes))).repeat(2, 1) + 100 * rank
    return mirrored.reduce_scatter(x, 1, sizes, ranks)


@everywhere
def test_reduce_scatter_sums_and_cuts(where: str) -> None:
    a, b, c = run(where, scatter_sum, 3, (0, 1, 2), [2, 1, 1])
    assert a.tolist() == [[300, 303]] * 2
    assert b.tolist() == [[306]] * 2
    assert c.tolist() == [[309]] * 2


@everywhere
def test_reduce_scatter_cuts_in_the_order_of_ranks(where: str) -> None:
    a, b, c = run(where, scatter_sum, 3, (2, 0), [3, 0])
    assert a.shape == (2, 0) and b is None
    assert c.tolist() == [[200, 202, 204]] * 2


def all_gather_dtype(rank: int, dtype: torch.dtype) -> Tensor:
    return mirrored.all_gather(torch.ones(rank, 2).to(dtype), 0, [0, 1, 2], (0, 1, 2))


@everywhere
@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.complex128], ids=str
)
def test_data_of_every_dtype_moves(where: str, dtype: torch.dtype) -> None:
    for got in run(where, all_gather_dtype, 3, dtype):
        assert got.dtype == dtype and got.shape == (3, 2)
        assert (got.to(torch.complex64) == 1).all()


def gather_conjugate(rank: int) -> Tensor:
    x = torch.tensor([complex(0, rank)]).conj()
    return mirrored.all_gather(x, 0, [1, 1], (0, 1))


@everywhere
def test_conjugate_views_are_resolved(where: str) -> None:
    for got in run(where, gather_conjugate, 2):
        assert torch.equal(got, torch.tensor([0j, -1j]))


def transpose(rank: int, n: int, rows: list[int], columns: list[int]) -> Tensor:
    whole = torch.arange(sum(rows) * sum(columns)).view(sum(rows), sum(columns))
    own = whole.split(rows)[rank]
    return mirrored.all_to_all(own, 1, columns, 0, rows, world(n))


@everywhere
@pytest.mark.parametrize("n", SIZES)
def test_all_to_all_moves_the_split_to_another_dim(where: str, n: int) -> None:
    rows, columns = [2, 0, 1, 3][:n], [1, 2, 0, 2][:n]
    whole = torch.arange(sum(rows) * sum(columns)).view(sum(rows), sum(columns))
    results = run(where, transpose, n, n, rows, columns)
    for got, expected in zip(results, whole.split(columns, 1), strict=True):
        assert torch.equal(got, expected)


def send_round(rank: int, source: int, ranks: tuple[int, ...]) -> Tensor | None:
    if rank not in ranks:
        return None
    x = torch.tensor(float(rank), dtype=torch.bfloat16) if rank == source else None
    return mirrored.broadcast(x, (), torch.bfloat16, "cpu", source, ranks)


@everywhere
def test_broadcast_sends_from_a_world_rank(where: str) -> None:
    assert [x.item() for x in run(where, send_round, 3, 2, (0, 1, 2))] == [2, 2, 2]
    none, *rest = run(where, send_round, 3, 1, (2, 1))
    assert none is None and [x.item() for x in rest] == [1, 1]


def same_bits(rank: int, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n * 7, generator=torch.Generator().manual_seed(rank))
    part = mirrored.reduce_scatter(x, 0, [7] * n, world(n))
    return mirrored.all_reduce(x, world(n)), mirrored.all_gather(part, 0, [7] * n, world(n))


@everywhere
@pytest.mark.parametrize("n", SIZES)
def test_sums_have_the_same_bits_on_every_rank(where: str, n: int) -> None:
    results = run(where, same_bits, n, n)
    for whole, parts in results:
        assert torch.equal(whole, results[0][0]) and torch.equal(parts, results[0][0])


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sizes: list[int], ranks: tuple[int, ...]) -> Tensor:
        ctx.sizes, ctx.ranks = sizes, ranks
        return mirrored.all_gather(x, 0, sizes, ranks)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return mirrored.reduce_scatter(grad, 0, ctx.sizes, ctx.ranks), None, None


def gradient(rank: int) -> Tensor:
    x = torch.ones(rank, requires_grad=True)
    y = Gather.apply(x, [0, 1, 2], (0, 1, 2))
    y += 1  # the result is not a view: in-place ops are allowed
    (y * torch.arange(3.0) * (rank + 1)).sum().backward()
    return x.grad


@everywhere
def test_collectives_serve_in_autograd_functions(where: str) -> None:
    assert [g.tolist() for g in run(where, gradient, 3)] == [[], [0], [6, 12]]
