"""What holds for every cut of every tensor, on simulated ranks and on gloo."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mirrored
from mirrored import current
from tests.mirrored.kinds import everywhere, run

N = 3
orders = st.permutations(range(N)).map(tuple)
sizes = st.lists(st.integers(0, 3), min_size=N, max_size=N)
dims = st.integers(0, 2)
few = settings(max_examples=25, deadline=None)


def values(seed: int, shape: list[int]) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=g).double()


def cut_and_gather(rank: int, cut: list[int], dim: int, ranks: tuple[int, ...]) -> bool:
    shape = [2, 1, 2]
    shape[dim] = sum(cut)
    whole = values(0, shape)
    piece = whole.split(cut, dim)[ranks.index(rank)]
    return torch.equal(mirrored.all_gather(piece, dim, cut, ranks), whole)


@everywhere
@few
@given(cut=sizes, dim=dims, ranks=orders)
def test_cut_then_gather_is_the_identity(where: str, cut: Any, dim: int, ranks: Any) -> None:
    assert run(where, cut_and_gather, N, cut, dim, ranks) == [True] * N


def scatter_and_gather(rank: int, cut: list[int], dim: int, ranks: tuple[int, ...]) -> bool:
    shape = [2, 1, 2]
    shape[dim] = sum(cut)
    x = values(rank, shape)
    part = mirrored.reduce_scatter(x, dim, cut, ranks)
    return torch.equal(mirrored.all_gather(part, dim, cut, ranks), mirrored.all_reduce(x, ranks))


@everywhere
@few
@given(cut=sizes, dim=dims, ranks=orders)
def test_reduce_scatter_then_gather_is_all_reduce(
    where: str, cut: Any, dim: int, ranks: Any
) -> None:
    assert run(where, scatter_and_gather, N, cut, dim, ranks) == [True] * N


def there_and_back(
    rank: int, cuts: tuple[list[int], list[int]], dims: tuple[int, int], ranks: tuple[int, ...]
) -> bool:
    shape, me = [2, 1, 2], ranks.index(rank)
    for dim, cut in zip(dims, cuts, strict=True):
        shape[dim] = sum(cut)
    whole, (i, j), (a, b) = values(0, shape), dims, cuts
    x = whole.split(a, i)[me]
    y = mirrored.all_to_all(x, j, b, i, a, ranks)
    return torch.equal(y, whole.split(b, j)[me]) and torch.equal(
        mirrored.all_to_all(y, i, a, j, b, ranks), x
    )


@everywhere
@few
@given(
    cuts=st.tuples(sizes, sizes),
    dims=st.permutations(range(3)).map(lambda p: tuple(p[:2])),
    ranks=orders,
)
def test_all_to_all_there_and_back(where: str, cuts: Any, dims: Any, ranks: Any) -> None:
    assert run(where, there_and_back, N, cuts, dims, ranks) == [True] * N


def deliver(rank: int, messages: list[tuple[int, int, int]]) -> bool:
    """`messages` are (from, to, items)."""
    labelled = [(a, b, torch.full((size,), k)) for k, (a, b, size) in enumerate(messages)]
    sends = [(b, x) for a, b, x in labelled if a == rank]
    expected = [(a, x) for a, b, x in labelled if b == rank]
    got = current().exchange(sends, [(a, x.shape, x.dtype) for a, x in expected], (0, 1, 2))
    return all(torch.equal(x, y) for x, (_, y) in zip(got, expected, strict=True))


message = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.integers(0, 2))


@everywhere
@few
@given(messages=st.lists(message, max_size=12))
def test_any_set_of_messages_arrives(where: str, messages: Any) -> None:
    assert run(where, deliver, N, messages) == [True] * N
