"""Models that hold a user's ``autograd.Function`` train as one process does, under every plan, in
stages, compiled, and with random numbers of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import consistent
from consistent import B, P, Placement, S
from consistent.nn import pipeline
from tests.consistent.torch_patches.functions_of_users import (
    BLOCKS,
    PLANS,
    Kernel,
    loss,
    make,
    model,
)
from tests.ranks import ALL, on_ranks
from tests.twins import assert_same, randn


def train(net: nn.Module, give: Callable[[Any], Any], steps: int = 2) -> list[Any]:
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(net(give(randn(5, 4, seed=step))), give(randn(5, 4, seed=step + 9)))
        value.backward()
        optimizer.step()
        found.append(value.item())
    return [found, list(net.parameters())]


def _all(ranks: int) -> Placement:
    return Placement("cpu", range(ranks))


def _world() -> int:
    return torch.distributed.get_world_size()


@on_ranks(2, 3)
def test_under_every_plan(rank: int) -> None:
    """The input split or whole, in turn."""
    for i, block in enumerate(BLOCKS):
        wanted = train(model(block), lambda x: x)
        for j, plan in enumerate(PLANS):
            for entry in (S(0), B) if ALL else ((S(0), B)[(i + j) % 2],):
                net = consistent.parallelize(model(block), _all(_world()), plan)
                given = train(
                    net, partial(consistent.distribute, placement=_all(_world()), sbp=entry)
                )
                assert_same(given, wanted, f"{block.__name__} under {plan}")


@on_ranks(2, 3)
def test_a_module_that_is_given_parts_is_given_the_whole_inside(rank: int) -> None:
    """``inputs=`` says what ranks pass from outside. Inside a Function arguments are whole."""
    p = _all(_world())
    for plan in ("data", "zero3"):
        torch.manual_seed(0)
        plain = nn.Linear(4, 4).double()
        net = consistent.parallelize(nn.Linear(4, 4).double(), p, plan, inputs=S(0))
        net.load_state_dict(plain.state_dict())

        def through(net: Any, x: Any) -> Any:
            def backward(ctx: Any, g: Any) -> Any:
                with torch.enable_grad():
                    z = ctx.x.detach().requires_grad_()
                    y = net(z).sin()
                y.backward(g)
                return z.grad

            def forward(ctx: Any, x: Any) -> Any:
                ctx.x = x
                return net(x).sin()

            made = make(forward, backward)
            y = made.apply(x)
            y.square().sum().backward()
            return y, x.grad, net.weight.grad

        x = consistent.distribute(randn(5, 4), p, S(0)).requires_grad_()
        assert_same(through(net, x), through(plain, randn(5, 4).requires_grad_()), plan)


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
@on_ranks(2)
def test_in_stages(rank: int, schedule: str) -> None:
    places = [Placement("cpu", [r]) for r in range(_world())]
    count = 4 if schedule == "zbvzerobubble" else 2
    x, target = randn(6, 4), randn(6, 4, seed=1)
    for block in BLOCKS:
        plain, staged = model(block, count), model(block, count)
        pipe = pipeline(staged, places, loss=loss, micro_batches=2, schedule=schedule)
        if block is Kernel:
            with pytest.raises(RuntimeError, match="Made: .* recorded.*\n.*register_fake"):
                pipe.step(x, target)
            continue
        given, wanted = pipe.step(x, target), loss(plain(x), target)
        wanted.backward()
        assert_same(
            [given, *(p.grad for p in staged.parameters())],
            [wanted, *(p.grad for p in plain.parameters())],
            f"{block.__name__} in {schedule}",
        )


def _plain(found: list[Any]) -> list[Any]:
    return [x if isinstance(x, float) else x.full() for x in found]


@on_ranks(2)
def test_compiled(rank: int) -> None:
    for block in BLOCKS:
        found: list[Any] = []
        for compiled in (False, True):
            net = consistent.parallelize(model(block), _all(_world()), "data")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

            def step(x: Any, target: Any, net: Any = net, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                value = loss(net(x), target)
                value.backward()
                optimizer.step()
                return value

            run = consistent.compile(step, backend="ops") if compiled else step
            give = [
                consistent.distribute(randn(6, 4, seed=i), _all(_world()), S(0)) for i in range(8)
            ]
            found.append([run(give[i], give[i + 4]).item() for i in range(4)])
            found[-1] += list(net.parameters())
        assert_same(_plain(found[1]), _plain(found[0]), block.__name__)


# -- random numbers --------------------------------------------------------------------------------


def _noisy(ctx: Any, x: Any) -> Any:
    ctx.drawn = torch.rand_like(x)
    return nn.functional.dropout(x * ctx.drawn + torch.randn(x.shape).double(), 0.5)


def _noisy_backward(ctx: Any, g: Any) -> Any:
    return g * ctx.drawn + torch.empty_like(g).normal_() + torch.randperm(4)


def _draws(p: Placement, entry: Any, give: Any) -> list[Any]:
    torch.manual_seed(5)
    w = consistent.rand(5, 4, placement=p, sbp=B).double()
    noisy = make(_noisy, _noisy_backward)
    both = make(
        lambda ctx, x: x + nn.functional.dropout(w, 0.5) + torch.rand(4).double(),
        lambda ctx, g: nn.functional.dropout(g * w, 0.5) + torch.rand_like(g),
    )
    found = []
    for made in (noisy, noisy, both, both):
        x = give(randn(5, 4), entry).requires_grad_()
        y = made.apply(x)
        y.square().sum().backward()
        found += [y, x.grad]
    scripted = torch.jit.script(_scripted)
    found += [scripted(give(randn(5, 4), entry)), consistent.rand(3, placement=p, sbp=B)]
    return [x.full() for x in found]


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@on_ranks(2, 3)
def test_random_numbers_are_those_of_one_rank(rank: int) -> None:
    torch.rand(rank)  # each rank's plain numbers are elsewhere
    alone, p = Placement("cpu", [0]), _all(_world())

    def on(place: Placement) -> Any:
        return lambda x, e: consistent.distribute(x, place, e)

    wanted = _draws(alone, B, on(alone))
    assert not torch.equal(wanted[0], wanted[2])
    for entry in (S(0), B, P):
        torch.rand(rank)
        assert_same(_draws(p, entry, on(p)), wanted, str(entry))


@on_ranks(2)
def test_plain_numbers_go_on_as_before(rank: int) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    x = consistent.ones(5, 4, placement=_all(_world()), sbp=S(0)).double().requires_grad_()
    make(_noisy, _noisy_backward).apply(x).sum().backward()
    assert_same(torch.rand(4), wanted)


@on_ranks(2)
def test_other_seeds_are_refused_where_numbers_are_drawn(rank: int) -> None:
    torch.manual_seed(rank)
    x = consistent.ones(5, 4, placement=_all(_world()), sbp=S(0)).double()

    class Quiet(Function):
        forward = staticmethod(lambda ctx, x: x * 2)

    class Loud(Function):
        forward = staticmethod(lambda ctx, x: x * torch.rand(4).double())

    Quiet.apply(x)
    with pytest.raises(RuntimeError, match="Loud: the ranks are about to draw other"):
        Loud.apply(x)


@on_ranks(2)
def test_a_seed_set_inside_lasts(rank: int) -> None:
    def seeding(ctx: Any, x: Any) -> Any:
        torch.manual_seed(11)
        return x * torch.rand(4).double()

    torch.manual_seed(0)
    x = consistent.ones(5, 4, placement=_all(_world()), sbp=S(0)).double()
    y = make(seeding, None).apply(x)
    found = torch.rand(2)
    torch.manual_seed(11)
    assert_same(y, torch.ones(5, 4).double() * torch.rand(4).double())
    assert_same(found, torch.rand(2))


# -- ranks outside the placement -------------------------------------------------------------------


@on_ranks(2, 3)
def test_ranks_outside_follow(rank: int) -> None:
    """Values are read inside, and global tensors are met, where only a part of the ranks runs."""
    part = Placement("cpu", range(1, _world()))

    def run(at: Callable[[Any, Any], Any]) -> list[Any]:
        w, found = at(randn(5, 4, seed=1), S(0)), []

        def forward(ctx: Any, x: Any) -> Any:
            ctx.total, ctx.kept = (x * w).sum().item(), w.exp()
            picked = w[w > 0]  # its size is known by running it
            return x * w + ctx.total + picked.sum() * len(picked)

        def backward(ctx: Any, g: Any) -> Any:
            return (g * w * ctx.total).clamp(-2, 2) + ctx.kept[ctx.kept > 1].sum().item()

        for entry in (S(0), B, P):
            x = at(randn(5, 4), entry).requires_grad_()
            y = make(forward, backward).apply(x)
            y.square().sum().backward()
            found += [y, x.grad]
        return found

    given = run(lambda x, entry: consistent.distribute(x, part, entry))
    assert_same(given, run(lambda x, entry: x.clone()))
