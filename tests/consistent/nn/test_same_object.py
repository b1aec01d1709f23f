"""A parameter stays the object that it was before parallelize, and who had it then goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import consistent
from consistent import B, GlobalTensor, Placement, S
from tests.ranks import ALL, on_ranks, pool
from tests.twins import assert_same, randn


class Tied(nn.Module):
    """A tied weight, a layer that is used twice, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale + self.shift
        return self.head(torch.tanh(self.again(torch.tanh(self.block(x)))))


IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 2], [3, 3, 1]])


def _losses(model: Any, optimizer: Any, ids: Any, labels: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _both(rank: int, kind: str, plan: str, ranks: list[int], before: int) -> tuple[Any, Any]:
    """Losses of plain torch, and those of a model that is parallelized after ``before`` steps of
    its optimizer. Ranks but the first begin with other values."""
    labels, placement = IDS.flip(1), Placement("cpu", ranks)

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = Tied().double()
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    wanted = _losses(*made(0), IDS, labels, before + 3)
    model, optimizer = made(rank)
    params = list(model.parameters())
    found = _losses(model, optimizer, IDS, labels, before)
    consistent.parallelize(model, placement, plan)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight and model.scale.grad is None
    assert type(model.shift) is GlobalTensor
    ids, labels = (consistent.distribute(x, placement, S(0)) for x in (IDS, labels))
    return wanted, found + _losses(model, optimizer, ids, labels, 3)


# Each pair of a kind, a plan and a number of steps before.
@pytest.mark.parametrize(
    ("kind", "plan", "before"),
    [
        (kind, plan, before)
        for i, kind in enumerate(["AdamW", "SGD", "Adagrad"])
        for j, plan in enumerate(["data", "zero1", "zero2", "zero3"])
        for k, before in enumerate([0, 2])
        if ALL or (i + j) % 2 == k
    ],
)
def test_an_optimizer_that_was_made_before_trains(kind: str, plan: str, before: int) -> None:
    for ranks in ([0, 1], [0]):
        wanted, found = pool(2).run(_both, kind, plan, ranks, before)[0]
        assert_same(found, wanted)


@on_ranks(2)
def test_its_state_lies_as_the_plan_says(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    for plan, sbp in (("data", B), ("zero1", S(0)), ("zero3", S(0))):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        for is_plain in (True, False):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if is_plain:
                consistent.parallelize(model, placement, plan)
        assert optimizer.state[model.weight]["exp_avg"].sbp == (sbp,)


@on_ranks(2)
def test_an_optimizer_of_a_module_on_meta_trains_it(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state_on_meta = torch.optim.Adagrad(model.parameters())
    consistent.parallelize(model, placement, "zero3")
    before = model.weight.full().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.full(), before)
    with pytest.raises(RuntimeError, match=r"Adagrad.step: .*'sum'.* on meta.* Make the optimizer"):
        state_on_meta.step()


@on_ranks(2)
def test_what_else_has_the_parameter_goes_on(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model, outside = nn.Linear(3, 4).double(), nn.Linear(3, 4, bias=False)
    outside.weight = model.weight
    model.weight.note = "kept"  # type: ignore[attr-defined]
    by_parameter = {model.weight: 1}
    consistent.parallelize(model, placement, {"weight": S(0)})
    assert outside.weight is model.weight and by_parameter[model.weight] == 1
    assert model.weight.note == "kept" and isinstance(model.weight, nn.Parameter)  # type: ignore[attr-defined]


@on_ranks(2)
def test_hooks_of_a_parameter_stay_and_see_the_logical_gradient(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    x = randn(5, 3)
    for plan in ("data", "zero3"):
        model, seen, later = nn.Linear(3, 4).double(), [], []
        model.weight.register_hook(lambda grad, seen=seen: seen.append(grad.full()))
        handle = model.weight.register_hook(lambda grad: 2 * grad)
        model.weight.register_post_accumulate_grad_hook(
            lambda leaf, later=later: later.append(leaf.grad.full())
        )
        consistent.parallelize(model, placement, plan, inputs=B)
        model(x).sum().backward()
        once = x.sum(0).expand(4, 3)
        assert_same([*seen, *later, model.weight.grad.full()], [once, 2 * once, 2 * once])
        handle.remove()
        model.zero_grad()
        model(x).sum().backward()
        assert_same(model.weight.grad.full(), once)


@on_ranks(2)
def test_a_gradient_that_is_there_is_that_of_the_first_rank(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    x = randn(5, 4)
    for plan in ("data", "zero1", "zero2", "zero3"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False).double()
        model(x + rank).sum().backward()
        consistent.parallelize(model, placement, plan, inputs=B)
        assert model.weight.grad.sbp == ((S(0) if plan in ("zero2", "zero3") else B),)
        model(x).sum().backward()
        assert_same(model.weight.grad.full(), 2 * x.sum(0).expand(4, 4))


@on_ranks(2)
def test_a_sparse_gradient_that_is_there_is_an_error(rank: int) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of 'weight'.*sparse.*zero_grad"):
        consistent.parallelize(model, Placement("cpu", [0, 1]))
    assert type(model.weight) is nn.Parameter


@on_ranks(2)
def test_an_earlier_graph_is_an_error(rank: int) -> None:
    model = nn.Linear(3, 3)
    loss = model(torch.ones(2, 3)).sum()
    consistent.parallelize(model, Placement("cpu", [0, 1]))
    with pytest.raises(RuntimeError, match=r"made before consistent\.parallelize"):
        loss.backward()


@on_ranks(2)
def test_an_optimizer_of_a_parameter_that_was_replaced_is_an_error(rank: int) -> None:
    model = nn.Linear(3, 3)
    held = torch._C._WeakTensorRef(model.weight)  # torch gives the object no other tensor then
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consistent.parallelize(model, Placement("cpu", [0, 1]))
    assert not held.expired()
    model(torch.ones(2, 3)).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SGD.step: .*'weight'.* Make the optimizer"):
            optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_an_optimizer_of_a_weight_that_two_stages_have_goes_on(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stages = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = consistent.nn.pipeline(model, stages, ["1"], loss=F.mse_loss, micro_batches=2)
    pipe.step(torch.ones(2, 4), torch.ones(2, 4))
    before = model[0].weight.full()
    optimizer.step()
    assert_same(model[0].weight.full(), model[1].weight.full())
    assert not torch.equal(model[0].weight.full(), before)
