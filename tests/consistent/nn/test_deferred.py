"""Modules built on meta: only shards are allocated, and the values are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks, pool
from tests.twins import GRIDS, assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6))
        self.attend = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


class Scaled(nn.Module):
    """Initialises what is inside it, as models of transformers and nanoGPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=7.0)
            nn.init.zeros_(module.bias)


def _initialised(rank: int, cls: Any, ranks: Any, plan: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = cls()
    model = consistent.parallelize(model, Placement("cpu", ranks), plan)
    assert all(p.requires_grad for p in model.parameters())
    return {name: x.full() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("cls", [Net, Scaled])
def test_values_are_those_of_one_rank_whatever_the_plan(cls: type) -> None:
    (alone, *_) = pool(2).run(_initialised, cls, [0], "data")
    assert float(alone[list(alone)[0]].std()) > 0.1
    for ranks, plan in ((2, "zero3"), (3, "zero1"), (4, {"0": "zero3", "1": "data"})):
        for found in pool(ranks).run(_initialised, cls, GRIDS[ranks], plan):
            assert_same(found, alone)


@on_ranks(2)
def test_only_the_shard_is_allocated(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    with torch.device("meta"):
        model = nn.Linear(10, 7)
    consistent.parallelize(model, placement, {"*": S(0)})
    assert model.weight.to_local().shape == ((4, 3)[rank], 10)
    assert model.weight.to_local().untyped_storage().nbytes() == (4, 3)[rank] * 10 * 4


class Bare(nn.Module):
    """Has values that only its constructor knows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


@on_ranks(2)
def test_values_that_nothing_writes_are_nan_with_a_warning(rank: int) -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.warns(UserWarning, match="table.*built on meta"):
        consistent.parallelize(model, Placement("cpu", [0, 1]))
    assert model.table.isnan().all()
    with torch.device("meta"):
        whole = Bare(torch.int64)
    with pytest.raises(ValueError, match="table was built on meta.*Build it outside"):
        consistent.parallelize(whole, Placement("cpu", [0, 1]))


@on_ranks(2)
def test_values_that_a_module_has_are_kept(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = model[0].weight.detach().clone()
    model[1].to("meta")
    consistent.parallelize(model, Placement("cpu", [0, 1]), "zero3")
    assert torch.equal(model[0].weight.full(), before)
    assert not model[1].weight.isnan().any()


class WithMask(nn.Module):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.mask = torch.ones(4)
        if resets:
            self.reset_parameters = lambda: setattr(self, "mask", torch.ones(4))


@on_ranks(2)
def test_an_attribute_that_stays_on_meta_is_an_error_with_its_name(rank: int) -> None:
    for plan, sync in (("zero3", True), ("data", False)):
        with torch.device("meta"):
            model = nn.Sequential(WithMask(False))
        with pytest.raises(ValueError, match=r"'0.mask' was built on meta.*register_buffer"):
            consistent.parallelize(model, Placement("cpu", [0, 1]), plan, sync=sync)
    with torch.device("meta"):
        filled = WithMask(True)
    consistent.parallelize(filled, Placement("cpu", [0, 1]))
    assert filled.mask.sum() == 4
