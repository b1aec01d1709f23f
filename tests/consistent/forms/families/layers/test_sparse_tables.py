"""Tables with ``sparse=True`` whose rows are split over the ranks that split the indices: training
by optimizers that take sparse gradients equals plain torch, and what is sent follows from the rows
that are looked up, not from those that the table has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.ranks import on_ranks

ROWS, WIDTH, BATCH, BAG = 101, 8, 13, 5


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number of state for each row, the mean of its squares, for tables of
    recommenders (as in torchrec.optim.RowWiseAdagrad)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for p in self._params():
            self.state[p]["sum"] = p.new_zeros((p.shape[0], 1))

    def _params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in self._params():
            total, grad = self.state[p]["sum"], p.grad
            if not grad.is_sparse:
                total.add_(grad.pow(2).mean(1, keepdim=True))
                p.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-group["lr"])
                continue
            grad = grad.coalesce()
            at, values = grad._indices(), grad._values()
            means = torch.sparse_coo_tensor(at, values.pow(2).mean(1, True), total.shape)
            total.add_(means)
            root = total.sparse_mask(means.coalesce())._values().sqrt_().add_(group["eps"])
            p.add_(torch.sparse_coo_tensor(at, values / root, p.shape), alpha=-group["lr"])


class Model(nn.Module):
    """indices: [n, BAG] -> [n, 3]."""

    def __init__(self, bags: bool, sparse: bool, rows: int = ROWS) -> None:
        super().__init__()
        self.table: nn.Module
        if bags:
            self.table = nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse)
        else:
            self.table = nn.Embedding(rows, WIDTH, sparse=sparse, padding_idx=3)
        self.bags, self.head = bags, nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, indices: Tensor) -> Tensor:
        found = self.table(indices)
        return self.head(found if self.bags else found.mean(1))


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
    "RowWiseAdagrad": RowWiseAdagrad,
}
PLANS: dict[str, Any] = {
    "rows": {"table.weight": S(0)},
    "columns": {"table.weight": S(1)},
    "data": "data",
}


def train(model: Any, name: str, indices: Any, targets: Any, steps: int = 3) -> list[float]:
    optimizers = [OPTIMIZERS[name](list(model.table.parameters()))]
    optimizers.append(torch.optim.SGD(model.head.parameters(), lr=0.1))
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = F.cross_entropy(model(indices), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, 3)
def test_training_is_plain_torchs(rank: int, name: str, bags: bool) -> None:
    placement = Placement.all("cpu")
    torch.manual_seed(0)
    indices, targets = torch.randint(0, ROWS, (BATCH, BAG)), torch.randint(0, 3, (BATCH,))
    given = [consistent.distribute(x, placement, S(0)) for x in (indices, targets)]
    for sparse in (True,) if name == "SparseAdam" else (True, False):
        model = Model(bags, sparse)
        plain = copy.deepcopy(model)
        wanted = train(plain, name, indices, targets)
        for plan in PLANS.values():
            ours: Any = consistent.parallelize(copy.deepcopy(model), placement, plan)
            assert train(ours, name, *given) == pytest.approx(wanted, abs=1e-9)
            assert ours.table.weight.grad.is_sparse == sparse
            torch.testing.assert_close(ours.table.weight.full(), plain.table.weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_bytes_follow_from_the_rows_that_are_looked_up(rank: int, name: str) -> None:
    placement, sent = Placement.all("cpu"), []
    indices, targets = torch.arange(BATCH * BAG).view(BATCH, BAG), torch.zeros(BATCH).long()
    given = [consistent.distribute(x, placement, S(0)) for x in (indices, targets)]
    for rows in (1000, 100_000):
        model = consistent.parallelize(Model(False, True, rows), placement, PLANS["rows"])
        train(model, name, *given)
        with counting() as log:
            train(model, name, *given, steps=1)
        sent.append(sum(call.bytes for call in log.calls if call.name != "gather_objects"))
    assert sent[0] == sent[1]


@on_ranks(2, 3)
def test_rows_of_one_rank_and_ranks_without_indices(rank: int) -> None:
    placement = Placement.all("cpu")
    table = torch.arange(ROWS * 2.0).view(ROWS, 2)
    for indices in (torch.zeros(7, dtype=torch.int64), torch.tensor([100]), torch.tensor([3, 3])):
        plain, ours = table.clone().requires_grad_(), consistent.distribute(table, placement, S(0))
        ours.requires_grad_()
        laid = consistent.distribute(indices, placement, S(0))
        F.embedding(indices, plain, 3, sparse=True).square().sum().backward()
        found = F.embedding(laid, ours, 3, sparse=True)
        found.square().sum().backward()
        assert plain.grad is not None and ours.grad is not None and ours.grad.sbp == (S(0),)
        want, have = plain.grad.coalesce(), ours.grad.coalesce()
        assert have._indices().full().equal(want._indices())  # none of the row of padding
        assert have._values().full().equal(want._values())


@on_ranks(2)
def test_all_ranks_say_alike_whether_entries_are_coalesced(rank: int) -> None:
    placement = Placement.all("cpu")
    table = consistent.distribute(torch.ones(6, 2), placement, S(0)).requires_grad_()
    # One entry on the first rank, which torch takes for coalesced, and three on the other.
    indices = consistent.distribute(torch.tensor([0, 3, 4, 5]), placement, S(0))
    F.embedding(indices, table, sparse=True).sum().backward()
    grad: Any = table.grad
    assert grad.sbp == (S(0),) and not grad.is_coalesced() and grad.coalesce().is_coalesced()
    found = table.detach().sparse_mask(grad.coalesce())
    assert found.to_dense().full().equal(grad.to_dense().full())
