"""parallelize takes the first rank's values; ranks that differ in more than values are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn import rank_values
from consistent.nn.plan import Border, Plan
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, use
from tests.ranks import on_ranks


class Mixed(nn.Module):
    """Tensors of several dtypes, an expanded buffer, and one that is not a parameter or buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2).double()
        self.register_buffer("ids", torch.randint(9, (4,)))
        self.register_buffer("rows", torch.randn(1, 3).expand(2, 3))
        self.register_buffer("nothing", torch.empty(0))
        self.scale = torch.randn(3)


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(module.state_dict())
    found = {k: v.full() if hasattr(v, "full") else v for k, v in found.items()}
    return {**found, "scale": module.scale}


def _assert_those_of(seed: int, module: nn.Module) -> None:
    for key, value in _values(Mixed(seed)).items():
        assert torch.equal(_values(module)[key], value), key


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["data", "split"])
def test_the_first_ranks_values_are_taken(rank: int, plan: str) -> None:
    rank_values.BUCKET, before = 40, rank_values.BUCKET  # several buckets
    try:
        p = Placement.all("cpu")
        patterns = {"*.weight": S(0)} if plan == "split" else None
        model = consistent.parallelize(Mixed(seed=rank), p, patterns)
    finally:
        rank_values.BUCKET = before
    _assert_those_of(0, model)
    assert type(model.scale) is torch.Tensor


@on_ranks(3)
def test_the_first_rank_of_the_placement_gives_them_and_others_take_no_part(rank: int) -> None:
    own = Mixed(seed=rank)
    kept = own.scale.clone()
    with use(Counting(current())) as counting:
        model = consistent.parallelize(own, Placement("cpu", [2, 0]))
    if rank == 1:
        assert not counting.calls and torch.equal(model.scale, kept)
    else:
        for key, value in Mixed(2).state_dict().items():
            assert torch.equal(model.state_dict()[key].to_local(), value), key
        assert torch.equal(model.scale, Mixed(2).scale)


@on_ranks(2)
def test_one_broadcast_a_dtype(rank: int) -> None:
    with use(Counting(current())) as counting:
        consistent.parallelize(Mixed(0), Placement.all("cpu"))
    assert counting.names == ["gather_objects", *["broadcast"] * 3], counting.names


@on_ranks(2)
def test_each_ranks_own_without_sync_and_nothing_on_meta(rank: int) -> None:
    p = Placement.all("cpu")
    with use(Counting(current())) as counting:
        model = consistent.parallelize(Mixed(rank), p, sync=False)
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        consistent.parallelize(empty, p, {"weight": S(0)}, sync=False, initialise=False)
    assert not counting.calls
    assert torch.equal(model.first.weight.to_local(), Mixed(rank).first.weight)
    assert empty.weight.shape == (4, 4) and empty.weight.sbp == (S(0),)
    assert not empty.weight.to_local().is_meta and empty.weight.to_local().shape == (2, 4)


@on_ranks(2)
def test_other_modules_are_an_error_on_every_rank(rank: int) -> None:
    p = Placement.all("cpu")
    for module, words in (
        (
            nn.Linear(3, 4 + rank),
            r"weight: float32 \[4, 3\] B\n.*rank 1 has weight: float32 \[5, 3\]",
        ),
        (nn.Linear(3, 4, bias=rank == 0), "rank 0 has bias.*\n.*rank 1 has fewer tensors"),
        (nn.Linear(3, 4).to([torch.float32, torch.float64][rank]), "float64"),
    ):
        with pytest.raises(ValueError, match=words):
            consistent.parallelize(module, p)
        assert type(module.weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"or their plans, differ.\n.*\[4, 3\] B\n.*\] S\(0\)"):
        consistent.parallelize(nn.Linear(3, 4), p, {"weight": S(0)} if rank else None)
    border = Plan({}, {"": Border({0: S(0)}, {}) if rank else Border({}, {0: B})})
    words = r"the module with outputs boxed to 0: B\n.*the module with inputs boxed to 0: S\(0\)"
    with pytest.raises(ValueError, match=words):
        consistent.parallelize(nn.Linear(3, 4), p, border)


_SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "coo that is not coalesced": lambda x: torch.sparse_coo_tensor(
        torch.stack([torch.arange(4), torch.ones(4).long()]).repeat(1, 2), x[0, 0].repeat(8), (4, 4)
    ),
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "hybrid": lambda x: x.to_sparse(1),
    "empty": lambda x: (x * 0).to_sparse(),
}


class _Graph(nn.Module):
    """A layer behind a matrix that is sparse."""

    def __init__(self, sparse: torch.Tensor, held_as: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        if held_as == "attribute":
            self.matrix = sparse
        elif held_as == "buffer":
            self.register_buffer("matrix", sparse)
        else:
            self.matrix = nn.Parameter(sparse, requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.layer(self.matrix.to_dense() @ x)


@on_ranks(2)
def test_sparse_tensors_have_the_first_ranks_entries(rank: int) -> None:
    """Of which the ranks have other numbers."""
    placement, x = consistent.placement("cpu", [0, 1]), torch.arange(12.0).view(4, 3).double()
    first, second = torch.eye(4).double() * 3, torch.ones(4, 4).double().triu()
    for make in _SPARSE.values():
        for held_as in ("attribute", "buffer", "parameter"):
            for plan in ("data", "zero3"):
                wanted = _Graph(make(first), held_as)
                wanted(x).square().sum().backward()
                net = _Graph(make(second if rank else first), held_as)
                consistent.parallelize(net, placement, plan)
                loss = net(consistent.distribute(x, placement, S(0))).square().sum()
                loss.backward()
                found = net.layer.weight.grad
                torch.testing.assert_close(found.full(), wanted.layer.weight.grad)


@on_ranks(2)
def test_sparse_tensors_that_differ_are_found(rank: int) -> None:
    placement = consistent.placement("cpu", [0, 1])
    for name, make in _SPARSE.items():
        if name == "empty":
            continue
        net = _Graph(make(torch.eye(4).double() * (rank + 1)), "attribute")
        with pytest.raises(ValueError, match="'matrix' differs between ranks"):
            consistent.parallelize(net, placement, check=True)
    other = torch.Tensor.to_sparse_csc if rank else torch.Tensor.to_sparse_csr
    with pytest.raises(ValueError, match="sparse_cs"):
        consistent.parallelize(_Graph(other(torch.eye(4).double()), "attribute"), placement)
