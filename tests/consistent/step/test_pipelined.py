"""A graph with stages against plain torch, in several micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import assert_same

from .test_graph import STEPS, Net, Train, batch, graph_of, plainly

WAYS: dict[int, list[tuple[list[int], str]]] = {
    2: [([0], "data"), ([1], "data")],
    4: [([0, 1], "data"), ([2, 3], "tensor")],
}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "one at a time"])
@on_ranks(2, 4)
def test_trains_as_one_process_does(rank: int, name: str) -> None:
    wanted, plain = plainly()
    net = Net()
    size = torch.distributed.get_world_size()
    places = []
    for index, (module, (ranks, plan)) in enumerate(
        zip((net.first, net.second), WAYS[size], strict=True)
    ):
        places.append(Placement("cpu", ranks))
        consistent.parallelize(module, places[-1], plan)
        module.to(consistent.nn.graph.GraphModule).set_stage(  # type: ignore[call-overload]
            stage_id=index, placement=places[-1]
        )
    graph = graph_of(net, micro_batches=3)
    graph.config.set_schedule(name)
    for step in range(STEPS):
        x, y = batch(step)
        first: Any = consistent.distribute(x, places[0], S(0))
        loss, out = graph(first, consistent.distribute(y, places[1], B))
        assert loss.item() == pytest.approx(wanted[step], abs=1e-9)
        assert out.shape == (8, 3)
    shown = graph.show()
    assert shown.startswith(f"{name}: 2 stages") and "stage 0 -> 1" in shown
    assert_same(dict(net.named_parameters()), dict(plain.named_parameters()))


def in_two_stages(net: Net) -> list[Placement]:
    places = [Placement("cpu", [0]), Placement("cpu", [1])]
    for index, module in enumerate((net.first, net.second)):
        consistent.parallelize(module, places[index])
        consistent.nn.Graph.stage(module, index, places[index])
    return places


def given_to(places: list[Placement], step: int) -> tuple[Any, Any]:
    x, y = batch(step)
    return consistent.distribute(x, places[0], B), consistent.distribute(y, places[1], B)


@on_ranks(2)
def test_scales_losses_as_one_process_does(rank: int) -> None:
    net, plain, by = Net(), Net(), [1.0]
    places = in_two_stages(net)
    for each in (net, plain):
        each.first.weight.register_hook(lambda grad: grad * by[0])
    graph = graph_of(net, micro_batches=2)
    mine = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
    graph.set_grad_scaler(mine)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step, by[0] in enumerate([1.0, float("inf"), 1.0, 1.0]):  # overflows in stage 0 alone
        loss, _ = graph(*given_to(places, step))
        x, y = batch(step)
        optimizer.zero_grad()
        wanted = F.cross_entropy(plain(x), y)
        scaler.scale(wanted).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        assert loss.item() == pytest.approx(wanted.item(), abs=1e-9)
        assert mine.get_scale() == scaler.get_scale()
    assert_same(dict(net.named_parameters()), dict(plain.named_parameters()))


class Alone(consistent.nn.Graph):
    """Without an optimizer."""

    def __init__(self, net: Net, backward: bool) -> None:
        super().__init__()
        self.net, self.backward = net, backward
        self.config.micro_batches = 2

    def build(self, x: Any, y: Any) -> Any:
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        if self.backward:
            loss.backward()
        return loss, out


@on_ranks(2)
def test_without_an_optimizer_backward_runs_where_it_is_called(rank: int) -> None:
    net, plain = Net(), Net()
    places = in_two_stages(net)
    x, y = batch(0)
    wanted = F.cross_entropy(plain(x), y)
    loss, out = Alone(net, backward=False)(*given_to(places, 0))
    assert_same((loss, out), (wanted, plain(x)))
    assert all(p.grad is None for p in net.parameters())
    wanted.backward()
    assert_same(Alone(net, backward=True)(*given_to(places, 0))[0], wanted)
    grads = {n: p.grad for n, p in plain.named_parameters()}
    assert_same({n: p.grad for n, p in net.named_parameters()}, grads)
    with torch.no_grad(), pytest.raises(RuntimeError, match="where no gradients are recorded"):
        Alone(net, backward=True)(*given_to(places, 0))


class Otherwise(Train):
    """Runs backward in other ways than ``loss.backward()``."""

    only: tuple[torch.Tensor, ...] = ()

    def build(self, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(self.net(x), y)
        if self.only:
            loss.backward(inputs=self.only)
        else:
            torch.autograd.backward(loss)
        return loss


@on_ranks(2)
def test_backward_that_a_step_does_not_scale_is_an_error(rank: int) -> None:
    staged = Net()
    places = in_two_stages(staged)
    laid: Any = consistent.parallelize(Net(), Placement.all("cpu"))
    for net, given in ((staged, given_to(places, 0)), (laid, batch(0))):
        graph = Otherwise(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for graph.only in ((), (net.second.weight,)):
            for graph.config.micro_batches, scaler in ((2, None), (1, True), (2, True)):
                graph.set_grad_scaler(torch.amp.GradScaler("cpu") if scaler else None)  # type: ignore[attr-defined]
                with pytest.raises(RuntimeError, match=r"inside a step .*\n.*Call loss.backward"):
                    graph(*given)
    graph = Otherwise(laid, torch.optim.SGD(laid.parameters(), lr=0.1))
    plain = Net()
    F.cross_entropy(plain(batch(0)[0]), batch(0)[1]).backward()
    graph(*batch(0))  # as it is: nothing is to be scaled
    assert_same(laid.first.weight.grad, plain.first.weight.grad)
