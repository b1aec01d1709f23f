"""What move refuses, on every rank and before anything has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from consistent.nn.sharded import prefetch
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, use
from tests.ranks import ALL, on_ranks

TWO, ONE = Placement("cpu", [0, 1]), Placement("cpu", [1])
X = torch.ones(4, 4)


def made_plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def made(plan: Any = "zero3", placement: Placement = TWO) -> Any:
    return consistent.parallelize(made_plain(), placement, plan)


def refused(model: Any, kind: type[Exception], words: str, *args: Any, **given: Any) -> None:
    """``move`` raises these words, and the model is as it was."""
    before = [(p._spec, p.full().clone()) for p in model.parameters()]
    with pytest.raises(kind, match=words):
        consistent.move(model, *args, **given)
    for p, (spec, value) in zip(model.parameters(), before, strict=True):
        assert p._spec is spec and torch.equal(p.full(), value)
    model(X).sum().backward()
    model.zero_grad()


@on_ranks(2)
def test_arguments(rank: int) -> None:
    model = made()
    own = torch.optim.SGD(model.parameters())
    refused(model, TypeError, "placement is \\[0\\] of type list", own, [0])
    refused(model, ValueError, "^move: there is no plan 'zero4'. Did you mean", own, ONE, "zero4")
    refused(model, ValueError, "^move: pattern 'x.*' matches no", own, ONE, {"x.*": S(0)})
    refused(model, TypeError, "optimizer is a Linear", nn.Linear(1, 1), ONE)
    others = torch.optim.SGD(made().parameters())
    refused(model, ValueError, "parameter 0 of SGD.* is not a parameter of", others, ONE)
    refused(model, TypeError, "optimizer is a Linear", [own, nn.Linear(1, 1)], ONE)


@on_ranks(2)
def test_models(rank: int) -> None:
    with pytest.raises(TypeError, match="model is a int"):
        consistent.move(1, None, ONE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was not parallelized"):
        consistent.move(nn.Linear(2, 2), None, ONE)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    consistent.parallelize(model[0], TWO)
    consistent.parallelize(model[1], ONE)
    with pytest.raises(ValueError, match="on 2 placements.*as a pipeline's stages are"):
        consistent.move(model, None, ONE)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    consistent.parallelize(inner[0], TWO)
    consistent.parallelize(inner, TWO)
    refused(inner, ValueError, "'0' inside this Sequential was parallelized by itself", None, ONE)


@on_ranks(2)
def test_moments(rank: int) -> None:
    model = made()
    with consistent.no_sync():
        refused(model, RuntimeError, "inside no_sync", None, ONE)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        consistent.move(model, None, ONE)

    def in_backward(grad: Any) -> None:
        with pytest.raises(RuntimeError, match="a backward is under way"):
            consistent.move(model, None, ONE)

    y = model(X)
    y.register_hook(in_backward)
    y.sum().backward()


class Moving(nn.Module):
    """It calls ``consistent.move`` of another module, and says whether that was refused."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.of = inner, [inner]
        self.words = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.try_it()
        return self.inner(x)

    def try_it(self, *given: Any) -> None:
        try:
            consistent.move(self.of[0], None, ONE)
        except RuntimeError as error:
            self.words = str(error)


PLANS = ("data", "zero1", "zero2", "zero3", "tensor")


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2)
def test_inside_a_forward(rank: int, plan: str) -> None:
    """In hooks, in a forward, with gradients and without, and where ``forward`` itself is
    called."""
    calls: list[Callable[[Any], Any]] = [lambda m: m(X), lambda m: m.forward(X)]
    hooks: list[Callable[[Any], Any]] = [
        lambda m: m.inner[0].register_forward_pre_hook(m.try_it),
        lambda m: m.inner[1].register_forward_hook(m.try_it),
        lambda m: m.inner.register_forward_pre_hook(m.try_it),
        lambda m: nn.modules.module.register_module_forward_hook(m.try_it),
    ]
    for grad in (True, False):
        for call in calls:
            model: Any = consistent.parallelize(Moving(made_plain()), TWO, plan)
            model.of = [model]
            with torch.set_grad_enabled(grad):
                call(model)
            assert model.words.startswith("move: a forward is under way, of Moving")
        for register in hooks:
            outer: Any = Moving(made(plan))
            handle = register(outer)
            with torch.set_grad_enabled(grad):
                outer.inner(X)
            handle.remove()
            assert outer.words.startswith("move: a forward is under way, of ")
            refused(outer.inner, ValueError, "there is no plan", None, ONE, "zero4")


@on_ranks(2)
def test_inside_what_is_no_forward_of_the_model(rank: int) -> None:
    """A trainer may be a module, and the model may have its training loop as a method."""
    outer: Any = Moving(made())
    assert outer(X).placement == ONE and outer.words == ""
    for plan in PLANS:  # another model, while the outer one is called
        moving: Any = consistent.parallelize(Moving(made_plain()), TWO, plan)
        moving.of = [made(plan)]
        moving(X)
        assert moving.words == "" and next(moving.of[0].parameters()).placement == ONE

    class Trained(nn.Linear):
        def fit(self) -> None:
            self(X).sum().backward()
            consistent.move(self, None, ONE)

    model: Any = consistent.parallelize(Trained(4, 4), TWO, "zero3")
    model.fit()
    assert model.weight.placement == ONE


class Payload:
    """Something that is freed as soon as nobody holds it."""


@on_ranks(2)
def test_variables_of_who_calls_are_let_go(rank: int) -> None:
    model, held = made("data"), Payload()
    seen = weakref.ref(held)
    consistent.move(model, None, ONE)
    del held
    assert seen() is None


@on_ranks(2)
def test_inside_a_step(rank: int) -> None:
    model = made("zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(*given: Any) -> None:
        consistent.move(model, optimizer, ONE)

    optimizer.register_step_pre_hook(hook)
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match="an optimizer steps '0.weight' now"):
        optimizer.step()


@on_ranks(2)
def test_a_graph_of_before(rank: int) -> None:
    """One that still holds values is refused at once, one that holds none when it is used."""
    model = made("data")
    hidden = model(X.clone().requires_grad_())
    refused(model, RuntimeError, "0.weight is still in use by a graph", None, ONE)
    del hidden
    view = model[0].weight[0]
    with pytest.raises(RuntimeError, match="0.weight is still in use"):
        consistent.move(model, None, ONE)
    del view
    for plan, moved in (("data", None), ("zero3", "data"), ("data", "zero3")):
        model = made(plan)
        loss = model[1].bias.sum() if plan == "data" else model(X).sum()
        consistent.move(model, None, ONE, moved)
        with pytest.raises(RuntimeError, match="was made before consistent.move"):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        model(X).sum().backward()
        assert model[1].bias.grad.tolist() == [4, 4]


GRAPHS: dict[str, Callable[[Any], Any]] = {}


def graph(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Name a way to make a loss whose graph is still there."""
    GRAPHS[make.__name__] = make
    return make


@graph
def never_used(model: Any) -> Any:
    return model(X).square().sum()


@graph
def retained(model: Any) -> Any:
    loss = model(X).square().sum()
    loss.backward(retain_graph=True)
    return loss


@graph
def retained_in_no_sync(model: Any) -> Any:
    with consistent.no_sync():
        return retained(model)


@graph
def added_up_in_no_sync(model: Any) -> Any:
    with consistent.no_sync():
        model(X).square().sum().backward()
        return model(X).square().sum()


@graph
def of_a_bias(model: Any) -> Any:
    """Backward needs no values."""
    with consistent.no_sync():
        return model[1].bias.sum() + model[0].bias.sum()


@graph
def of_a_gradient(model: Any) -> Any:
    params = list(model.parameters())
    grads = torch.autograd.grad(model(X).square().sum(), params, create_graph=True)
    return sum(grad.square().sum() for grad in grads)


# Each kind of graph under half of the plans.
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (kind, plan)
        for i, kind in enumerate(GRAPHS)
        for k, plan in enumerate(PLANS)
        if ALL or (i + k) % 2 == 0
    ],
)
@on_ranks(2)
def test_graphs_of_before_are_refused_or_refuse(rank: int, kind: str, plan: str) -> None:
    """A backward on a graph of before the move never goes through: it would add gradients for
    parameters as they lay, or use values that have been let go."""
    for place, later in ((ONE, None), (TWO, "data"), (TWO, "zero3"), (TWO, None)):
        model = made(plan)
        loss = GRAPHS[kind](model)
        summed = [None if p.grad is None else p.grad.full().clone() for p in model.parameters()]
        try:
            consistent.move(model, None, place, later)
        except RuntimeError as error:
            assert "is still in use by a graph" in str(error)
            del loss
            consistent.move(model, None, place, later)
        else:
            for synced in (nullcontext, consistent.no_sync):
                with synced(), pytest.raises(RuntimeError, match="was made before consistent"):
                    loss.backward(retain_graph=True)
        for p, before in zip(model.parameters(), summed, strict=True):
            assert p.grad is None if before is None else torch.equal(p.grad.full(), before)
        model.zero_grad()
        model(X).square().sum().backward()
        fresh = made("data")
        fresh(X).square().sum().backward()
        for p, wanted in zip(model.parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full(), wanted.grad.full())


@pytest.mark.parametrize("frozen", (False, True))
@on_ranks(3)
def test_graphs_of_before_gather_nothing_ahead(rank: int, frozen: bool) -> None:
    """Ranks of before would ask those of now. Where all is frozen, backward uses the values that
    the graph has."""
    asked = prefetch.has_spare_cores
    prefetch.has_spare_cores = lambda ranks: True  # type: ignore[assignment]
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(made_plain()(x).square().sum(), x)
    try:
        with use(Counting(current())):
            model = made().requires_grad_(not frozen)
            for _ in range(3):
                model(x).square().sum().backward()
            x.grad = None
            loss = model(x).square().sum()
            consistent.move(model, None, Placement("cpu", [0, 1, 2]))
            if frozen:
                loss.backward()
                assert rank == 2 or torch.allclose(x.grad, wanted)  # type: ignore[arg-type]
            else:
                with pytest.raises(RuntimeError, match="was made before consistent.move"):
                    loss.backward()
            x.grad = None
            model(x).square().sum().backward()
            assert torch.allclose(x.grad, wanted)  # type: ignore[arg-type]
    finally:
        prefetch.has_spare_cores = asked


@on_ranks(3)
def test_ranks_that_disagree(rank: int) -> None:
    """What one rank alone does wrong is raised on all, and nothing has moved."""
    model = made(placement=Placement("cpu", [0, 1, 2]))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: Any = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="do different things(.|\n)*rank 2 says"):
        consistent.move(model, optimizer, TWO, "data" if rank == 2 else "zero3")
    with pytest.raises(TypeError, match="optimizer is a Linear"):
        consistent.move(model, wrong if rank == 1 else optimizer, TWO)
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    refused(model, ValueError, "rank 1 says SGD group 0: .*0.2", optimizer, TWO)


@on_ranks(2)
def test_seeds_that_differ(rank: int) -> None:
    model = made("data", ONE)
    torch.manual_seed(rank)
    consistent.rand(3, placement=ONE, sbp=consistent.B)
    refused(model, RuntimeError, "0 times from seed 0|1 times from seed 0", None, TWO)
    torch.manual_seed(5)
    consistent.move(model, None, TWO)


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2)
def test_gradients_that_have_a_graph(rank: int, plan: str) -> None:
    """What is computed from them after the move would reach no parameter."""
    model = made(plan)
    model(X).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="0.weight.grad is the result of a graph|still in use"):
        consistent.move(model, None, ONE, "data")
    assert all(p.placement == TWO for p in model.parameters())
    model.zero_grad()
    consistent.move(model, None, ONE, "data")


@on_ranks(2)
def test_parameters_that_were_added_later(rank: int) -> None:
    """Ranks outside the placement have not trained them; those that stay have them already."""
    model = made(placement=ONE)
    model.append(nn.Linear(2, 2))
    refused(model[:2], ValueError, "was not parallelized", None, TWO)
    with pytest.raises(ValueError, match="'2.weight' is a plain parameter, .* Rank 0, which comes"):
        consistent.move(model, None, TWO)
    assert model[0].weight.placement == ONE
    consistent.move(model, None, ONE, "data")
    model(X).sum().backward()


@on_ranks(2)
def test_a_model_that_shares_a_parameter_is_not_half_moved_without_a_word(rank: int) -> None:
    first, second = made(), made_plain()
    second[0].weight = first[0].weight  # type: ignore[union-attr]
    consistent.parallelize(second, TWO, "zero3")
    consistent.move(first, None, ONE)
    with pytest.raises(RuntimeError, match="on different placements"):
        second(X)
    with pytest.raises(ValueError, match="move takes a model that is on one placement"):
        consistent.move(second, None, ONE)


@on_ranks(2)
def test_each_argument_that_differs(rank: int) -> None:
    model = made("data")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    differ = "do different things"
    refused(model, ValueError, differ, optimizer if rank else None, ONE)
    model(X).sum().backward()
    refused(model, ValueError, differ, optimizer, Placement("cpu", [rank]))
    refused(model, ValueError, differ, optimizer, ONE, inputs=S(0) if rank else None)
    refused(model, TypeError, "placement is 'x' of type str", optimizer, ONE if rank else "x")
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="this Linear was not parallelized"):
        consistent.move(model if rank else other, optimizer, ONE)
    model(X).sum().backward()
    if rank:
        model[0].zero_grad()
    with pytest.raises(ValueError, match=differ):
        consistent.move(model, optimizer, ONE)
    model.zero_grad()
    consistent.move(model, optimizer, ONE)


@on_ranks(2)
def test_sparse_gradients(rank: int) -> None:
    model: Any = consistent.parallelize(nn.Embedding(5, 2, sparse=True), TWO)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="weight.grad is torch.sparse_coo"):
        consistent.move(model, None, ONE)
    model.zero_grad()
    consistent.move(model, None, ONE)
    assert model.weight.placement == ONE
