"""Sparse tensors on some of the ranks: the others, which hold no part of them, know their layouts
and take the same decisions, so that programs and optimizers that ask for a layout go one way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from mirrored.every_rank import gather_from_ranks
from tests.consistent.forms.families.layers.test_sparse_tables import OPTIMIZERS
from tests.ranks import on_ranks

MATRIX = torch.eye(4) + torch.diag(torch.ones(3), 1)


def given(placement: Placement) -> Any:
    return consistent.distribute(MATRIX, placement, B)


def entries(placement: Placement) -> Any:
    return consistent.distribute(MATRIX.to_sparse(), placement, B)


def gradient(placement: Placement, sbp: Any = B) -> Any:
    """The gradient of a table with ``sparse=True``."""
    torch.manual_seed(0)
    table = consistent.parallelize(nn.Embedding(10, 4, sparse=True), placement, {"weight": sbp})
    table(consistent.distribute(torch.tensor([1, 2, 1]), placement, B)).square().sum().backward()
    return table.weight.grad


MADE: dict[str, Callable[[Placement], Any]] = {
    "distribute": entries,
    "distribute csr": lambda p: consistent.distribute(MATRIX.to_sparse_csr(), p, B),
    "rows": lambda p: consistent.distribute(MATRIX.to_sparse(), p, S(0)),
    "to_sparse": lambda p: given(p).to_sparse(),
    "to_sparse_csr": lambda p: given(p).to_sparse_csr(),
    "sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(
        consistent.distribute(torch.tensor([[0, 1], [1, 2]]), p, B),
        consistent.distribute(torch.ones(2), p, B),
        (4, 4),
    ),
    "+": lambda p: entries(p) + entries(p),
    "* 2": lambda p: entries(p) * 2,
    "*= 2": lambda p: entries(p).mul_(2),
    "@": lambda p: entries(p) @ given(p),
    "dense + sparse": lambda p: given(p) + entries(p),
    "add_": lambda p: given(p).add_(entries(p), alpha=-0.5),
    "sum": lambda p: torch.sparse.sum(entries(p)),
    "clone": lambda p: entries(p).clone(),
    "coalesce": lambda p: entries(p).coalesce(),
    "values": lambda p: entries(p)._values(),
    "to_dense": lambda p: entries(p).to_dense(),
    "B to S(1)": lambda p: entries(p).to_global(sbp=S(1)),
    "csr, B to S(0)": lambda p: MADE["distribute csr"](p).to_global(sbp=S(0)),
    "elsewhere": lambda p: entries(p).to_global(Placement("cpu", [1]), B),
    "gradient": gradient,
    "gradient of rows": lambda p: gradient(p, S(0)),
    "gradient, coalesced": lambda p: gradient(p).coalesce(),
    "gradient, values": lambda p: gradient(p).coalesce().values(),
    "gradients": lambda p: gradient(p) + gradient(p),
}


def seen(x: Any) -> Any:
    dims = (x.sparse_dim(), x.dense_dim(), x.is_coalesced()) if x.is_sparse else ()
    return str(x.layout), x.is_sparse, tuple(x.shape), x.dtype, x.sbp, dims


@pytest.mark.parametrize("name", MADE)
@on_ranks(3)
def test_ranks_outside_see_the_layout(rank: int, name: str) -> None:
    whole = MADE[name](Placement("cpu", range(3))).to_global(sbp=B).full()
    for ranks in ([0], [1, 2]):
        placement = Placement("cpu", ranks)
        made = MADE[name](placement)
        assert len(set(gather_from_ranks(seen(made)))) == 1
        back = made.to_dense() if made.layout is not torch.strided else made
        back = back.to_global(Placement("cpu", range(3)), B).full()
        torch.testing.assert_close(back, whole.to_dense())


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_a_table_on_some_ranks_is_trained(rank: int, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(11, 4, sparse=True).double()
    indices, wanted = torch.tensor([[1, 3], [3, 10]]), torch.randn(2, 2, 4).double()
    for ranks, sbp in (([0], B), ([1, 2], S(0)), ([2, 0], B)):
        placement, alone = Placement("cpu", ranks), copy.deepcopy(plain)
        ours = consistent.parallelize(copy.deepcopy(plain), placement, {"weight": sbp})
        x, y = (consistent.distribute(each, placement, B) for each in (indices, wanted))
        losses = [
            train(alone, OPTIMIZERS[name], indices, wanted), train(ours, OPTIMIZERS[name], x, y)
        ]  # fmt: skip
        if rank in ranks:
            assert losses[1] == pytest.approx(losses[0], abs=1e-12)


def train(table: nn.Module, make: Any, indices: Tensor, wanted: Tensor) -> list[float]:
    optimizer, losses = make(list(table.parameters())), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(table(indices), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
