"""Both halves together are one backward, and neither does the other's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from consistent import B, Placement, S, distribute, parallelize
from consistent.nn import pipeline
from consistent.pipeline.split_backward import SplitBackward
from tests.ranks import on_ranks
from tests.twins import assert_same, randn


class Shared(nn.Module):
    """One weight used twice, one beside the inputs' path, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.double()

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.a(x)) * self.scale
        y = y + self.a(y) + x
        return self.b(y) * self.scale + self.scale.exp()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "shared": Shared,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


@pytest.mark.parametrize("name", MODELS)
def test_halves_are_the_whole(name: str) -> None:
    plain, halves = model_of(name), model_of(name)
    x, grad = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(leaf).backward(grad)
    split = SplitBackward([halves(other)], [grad], [other])
    (of_input,) = split.backward_to_inputs()
    assert all(p.grad is None for p in halves.parameters())
    assert_same(of_input, leaf.grad)
    split.backward_to_parameters()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in halves.named_parameters()}, wanted)


@pytest.mark.parametrize("plan", ["data", "zero3", "tensor"])
@on_ranks(2)
def test_halves_of_global_tensors(rank: int, plan: str) -> None:
    plain, halves, world = model_of("mlp"), model_of("mlp"), Placement.all("cpu")
    parallelize(halves, world, plan)
    x, y = randn(5, 4), randn(5, 4, seed=1)
    leaf = x.clone().requires_grad_()
    (plain(leaf) - y).square().mean().backward()
    given = distribute(x, world, B if plan == "tensor" else S(0))
    local = given.to_local().detach().requires_grad_()
    from consistent.dispatch.plans.shards import attach
    from consistent.pipeline.cell import _ReceivedShard

    entered = attach(_ReceivedShard.apply(local, (local.detach(),)), given._spec)
    loss = (halves(entered) - y).square().mean()
    split = SplitBackward([loss], [None], [local])
    (of_input,) = split.backward_to_inputs()
    assert of_input is not None
    assert_same(attach(of_input.clone(), given._spec.dual), leaf.grad)
    split.backward_to_parameters()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in halves.named_parameters()}, wanted)


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_no_product_is_computed_twice() -> None:
    net, x = model_of("mlp"), randn(6, 4).requires_grad_()
    out = net(x)
    whole = flops(lambda: out.backward(torch.ones_like(out), retain_graph=True))
    split = SplitBackward([out], [torch.ones_like(out)], [x])
    first, second = flops(split.backward_to_inputs), flops(split.backward_to_parameters)
    assert first == second == whole // 2


def test_a_stage_without_inputs_has_all_in_its_second_half() -> None:
    plain, halves, x = model_of("mlp"), model_of("mlp"), randn(6, 4)
    plain(x).sum().backward()
    split = SplitBackward([halves(x).sum()], [None], [])
    assert split.backward_to_inputs() == []
    split.backward_to_parameters()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in halves.named_parameters()}, wanted)


class Hooked(nn.Module):
    """Stages with convs, norms and linears; what lies inside a stage has a hook, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(HookedBlock() for _ in range(4))
        self.double()

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class HookedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(6, 6), nn.LayerNorm(6), nn.Conv1d(3, 3, 1)
        self.shared = nn.Parameter(torch.rand(6))
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.linear(x)) * self.shared
        z = self.norm(y)
        if z.requires_grad:
            z.register_hook(lambda g: g * 0.5)
            y.register_hook(lambda g: 3 * g)
            y.retain_grad()
            self.seen.append(y)
        return x + self.conv(z) * self.shared


def hook_all(net: nn.Module, calls: list[str]) -> None:
    def hook(name: str) -> Any:
        def scaled(g: Any) -> Any:
            calls.append(name)
            return g * 0.1

        return scaled

    for name, p in net.named_parameters():
        p.register_hook(hook(name))


def test_hooks_count_once() -> None:
    plain, halves = Hooked(), Hooked()
    calls: tuple[list[str], list[str]] = [], []
    hook_all(plain, calls[0])
    hook_all(halves, calls[1])
    x, grad = randn(2, 3, 6), randn(2, 3, 6, seed=1)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(leaf).backward(grad)
    split = SplitBackward([halves(other)], [grad], [other])
    (of_input,) = split.backward_to_inputs()
    assert_same(of_input, leaf.grad)
    split.backward_to_parameters()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in halves.named_parameters()}, wanted)
    assert sorted(calls[0]) == sorted(calls[1])
    for ours, theirs in zip(halves.blocks, plain.blocks, strict=True):
        assert_same(ours.seen[0].grad, theirs.seen[0].grad)  # type: ignore[union-attr,index]


@on_ranks(2)
def test_hooks_count_once_under_zero_bubble_schedules(rank: int) -> None:
    plain, net = Hooked(), Hooked()
    x = randn(4, 3, 6)
    places = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(net, places, loss=mse_loss, micro_batches=4, schedule="zbvzerobubble")
    hook_all(plain, [])
    hook_all(net, [])
    wanted = mse_loss(plain(x), x)
    wanted.backward()
    assert pipe.step(x, x).item() == pytest.approx(wanted.item(), abs=1e-12)
    grads = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in net.named_parameters()}, grads)


def test_a_weight_used_through_another_op_counts_once() -> None:
    """One op takes it as it is, and leads to one that takes what is made of it."""
    x, w = randn(3), randn(3, seed=1)
    leaf, weight, other, ours = (t.clone().requires_grad_() for t in (x, w, x, w))

    def run(x: Any, w: Any) -> Any:
        made = w.exp()
        return torch.tanh(x * (made * 2)) * made

    run(leaf, weight).sum().backward()
    split = SplitBackward([run(other, ours).sum()], [None], [other])
    assert_same(split.backward_to_inputs()[0], leaf.grad)
    split.backward_to_parameters()
    assert_same(ours.grad, weight.grad)
