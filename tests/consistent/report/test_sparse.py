"""A report counts the bytes of sparse tensors that are sent: those of their entries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent import B, P, Placement, S
from consistent.spec import Sbp
from mirrored.every_rank import gather_from_ranks
from mirrored.transports.counting import counting
from tests.ranks import on_ranks

SHAPE = (40, 6)


def coo(seed: int, count: int, dense: bool) -> Tensor:
    """A sparse tensor of ``count`` entries, each a number or a row."""
    drawn = torch.Generator().manual_seed(seed)
    dims = SHAPE[:1] if dense else SHAPE
    indices = torch.stack([torch.randint(n, (count,), generator=drawn) for n in dims])
    values = torch.randn(count, *SHAPE[len(dims) :], generator=drawn)
    return torch.sparse_coo_tensor(indices, values, SHAPE).coalesce()


def shard(rank: int, sbp: Sbp, dense: bool) -> Tensor:
    """This rank's part, of which ranks have different numbers of entries."""
    if sbp is P:
        return coo(rank, 3 + 5 * rank, dense)
    whole = coo(7, 12, dense)
    if sbp is B:
        return whole
    return whole.to_dense().tensor_split(3, sbp.dim)[rank].to_sparse(1 if dense else 2)  # type: ignore[attr-defined]


def busiest(calls: list) -> int:
    mine = sum(call.bytes for call in calls if call.name == "all_gather")
    return max(gather_from_ranks(mine))


@on_ranks(3)
@pytest.mark.parametrize("dense", [False, True])
def test_bytes_are_those_of_entries(rank: int, dense: bool) -> None:
    line = Placement.all("cpu")
    for src, dst in itertools.product((S(0), S(1), B, P), (S(0), S(1), B)):
        x: Any = consistent.from_local(shard(rank, src, dense), line, src, shape=SHAPE)
        wanted = x.to_dense().to_global(sbp=dst).full()
        for timeline in (False, True):
            with consistent.report(timeline=timeline) as report, counting() as counted:
                moved = x.to_global(sbp=dst)
            assert report.nbytes == busiest(counted.calls), (src, dst)
            assert bool(report.boxings()) == (src != dst)
            assert report.nbytes < x.numel() * 4
        assert torch.allclose(moved.to_dense().full(), wanted)


@on_ranks(3)
def test_bytes_of_sparse_gradients(rank: int) -> None:
    line = Placement.all("cpu")
    table = consistent.distribute(torch.randn(1000, 8), line, B).requires_grad_()
    index = consistent.distribute(torch.arange(11) % 7, line, S(0))
    with consistent.report() as report, counting() as counted:
        F.embedding(index, table, sparse=True).sum().backward()
    # The busiest ranks look up 4 rows of 8 floats, each with its index.
    assert report.nbytes == 2 * 4 * (8 * 4 + 8) == busiest(counted.calls)
    assert report.bytes_by_op() == {"backward": report.nbytes}


@on_ranks(3)
def test_bytes_of_compressed_rows_and_on_ranks_outside(rank: int) -> None:
    pair = Placement("cpu", [0, 1])
    for by_rows in (False, True):
        part = coo(rank, 4 + 3 * rank, False)
        local = part.to_sparse_csr() if by_rows else part
        x: Any = consistent.from_local(local, pair, S(0), shape=(80, 6))
        with consistent.report() as report, counting() as counted:
            x.to_global(sbp=B)
        found = busiest(counted.calls)
        assert found > 0
        assert report.nbytes == (0 if rank == 2 else found)  # entries are not known outside


@on_ranks(4)
def test_each_axis_of_a_grid_is_a_move(rank: int) -> None:
    grid, whole = Placement("cpu", [[0, 1], [2, 3]]), coo(1, 30, False).to_dense()
    part = whole.tensor_split(2, 0)[rank // 2].tensor_split(2, 1)[rank % 2]
    x: Any = consistent.from_local(part.to_sparse(), grid, (S(0), S(1)), shape=SHAPE)
    with consistent.report() as report, counting() as counted:
        moved = x.to_global(sbp=(B, B))
    assert torch.equal(moved.to_dense().full(), whole)
    assert set(report.boxings()) == {"S(1) -all_gather(1)-> B", "S(0) -all_gather(0)-> B"}
    # Of each move, the bytes of the busier one of the two ranks that exchange entries.
    sent = [call.bytes for call in counted.calls if call.name == "all_gather"]
    assert report.nbytes >= sum(sent) > 0
