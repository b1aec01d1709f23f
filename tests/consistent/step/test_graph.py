"""nn.Graph against the same loop in plain torch, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import assert_same, randn

STEPS = 5


class Net(nn.Module):
    """Two layers, on two placements if they are global."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))
        w: Any = self.second.weight
        if isinstance(w, consistent.GlobalTensor):
            x = x.to_global(placement=w.placement, sbp=B)
        return self.second(x)


class Train(consistent.nn.Graph):
    """A step with a classification loss."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        super().__init__()
        self.net = net
        self.add_optimizer(optimizer, **more)

    def build(self, x: Any, y: Any) -> Any:
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss, out


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(3, (rows,), generator=torch.Generator().manual_seed(step))
    return randn(rows, 6, seed=step), labels


def plainly(amp: bool = False, schedule: bool = True) -> tuple[list[float], Net]:
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5 if schedule else 1.0)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses, net


def graph_of(net: nn.Module, **config: Any) -> Train:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    made = Train(net, optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    for name, value in config.items():
        setattr(made.config, name, value)
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "micro-batches": {"micro_batches": 3},
    "zero 1": {"zero": 1},
    "zero 2 and micro-batches": {"zero": 2, "micro_batches": 4},
    "zero 3": {"zero": 3},
    "zero 3 and micro-batches": {"zero": 3, "micro_batches": 3},
    "recomputed": {},
    "compiled": {"backend": "ops"},
    "compiled, micro-batches": {"backend": "ops", "micro_batches": 3},
    "compiled, zero": {"backend": "ops", "zero": 2},
    "compiled, zero 3": {"backend": "ops", "zero": 3},
}


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(1, 2, 3)
def test_trains_as_one_process_does(rank: int, name: str) -> None:
    wanted, plain = plainly()
    net, world = Net(), Placement.all("cpu")
    consistent.parallelize(net, world)
    graph = graph_of(net, **CONFIGS[name])
    if name == "recomputed":
        for module in (net.first, net.second):
            module.to(consistent.nn.graph.GraphModule).activation_checkpointing = True  # type: ignore[call-overload]
    for step in range(STEPS):
        x, y = batch(step)
        loss, out = graph(consistent.distribute(x, world, S(0)), y)
        assert loss.item() == pytest.approx(wanted[step], abs=1e-9)
        assert out.shape == (8, 3)
    assert_same(dict(net.named_parameters()), dict(plain.named_parameters()))
    if name.startswith("compiled"):
        # The schedule changes the learning rate outside the program, which reads it.
        assert len(graph._compiled.programs) == 1, graph.show()
        assert "call StepLR.step as it is written" in graph.show()
        assert "call AdamW.step" not in graph.show()


@on_ranks(2)
def test_state_is_split_by_zero(rank: int) -> None:
    net, world = Net(), Placement.all("cpu")
    consistent.parallelize(net, world)
    graph = graph_of(net, zero=2)
    graph(*batch(0))
    (optimizer,) = [pair[0] for pair in graph._optimizers._pairs]
    assert optimizer.state[net.first.weight]["exp_avg"].sbp == (S(0),)
    grad: Any = net.first.weight.grad
    assert grad.sbp == (S(0),)


@on_ranks(2, 3)
def test_parameters_are_split_by_zero_3(rank: int) -> None:
    net, world = Net(), Placement.all("cpu")
    consistent.parallelize(net, world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    graph = Train(net, optimizer)
    graph(*batch(0))
    assert net.first.weight.sbp == (B,)  # type: ignore[attr-defined]
    graph.config.enable_zero(stage=3)  # in mid-training: what the optimizer keeps goes along
    graph(*batch(1))
    for p in net.parameters():
        found: Any = p
        assert found.sbp == found.grad.sbp == optimizer.state[p]["exp_avg"].sbp == (S(0),)
    wanted, _ = plainly(schedule=False)
    assert graph(*batch(2))[0].item() == pytest.approx(wanted[2], abs=1e-9)


@on_ranks(4)
def test_stages_are_split_by_zero_3(rank: int) -> None:
    first, second = (Placement("cpu", ranks) for ranks in ([0, 1], [2, 3]))
    net = Net()
    consistent.parallelize(net.first, first)
    consistent.parallelize(net.second, second)
    graph = Train(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    graph.stage(net.first, 0, first)
    graph.stage(net.second, 1, second)
    graph.config.enable_zero(stage=3)
    graph.config.set_gradient_accumulation_steps(2)
    wanted, _ = plainly(schedule=False)
    for step in range(3):
        assert graph(*batch(step))[0].full().item() == pytest.approx(wanted[step], abs=1e-9)
    assert {p.sbp for p in net.parameters()} == {(S(0),)}  # type: ignore[attr-defined]


@on_ranks(2)
def test_zero_3_of_a_parameter_that_was_made_by_hand(rank: int) -> None:
    net = Net()
    net.first.weight = nn.Parameter(
        consistent.distribute(net.first.weight.detach(), Placement.all("cpu"), B)
    )
    graph = graph_of(net, zero=3)
    with pytest.raises(ValueError, match=r"'weight' of a Linear was made global otherwise"):
        graph(*batch(0))


@on_ranks(1, 2)
def test_autocast_and_scaler(rank: int) -> None:
    net, world = Net().float(), Placement.all("cpu")
    twin = Net().float()
    consistent.parallelize(net, world)
    seen = []
    net.first.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    graph = graph_of(net)
    graph.config.enable_amp()
    graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(2):
        x, y = batch(step)
        loss, _ = graph(x.float(), y)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = F.cross_entropy(twin(x.float()), y)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=2e-2)
    assert set(seen) == {torch.bfloat16}


def test_plain_modules_on_one_process() -> None:
    wanted, plain = plainly()
    net = Net()
    graph = graph_of(net, micro_batches=2)
    assert [graph(*batch(step))[0].item() for step in range(STEPS)] == pytest.approx(wanted)
    assert_same(graph.state_dict(), {f"net.{n}": p for n, p in plain.state_dict().items()})
    graph.load_state_dict(Train(Net(), torch.optim.SGD(net.parameters())).state_dict())
    assert_same(dict(net.named_parameters()), dict(Net().named_parameters()))


# -- bad input -------------------------------------------------------------------------------------


class Lost(Train):
    def build(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.net(x), y)


def test_a_step_without_backward_is_an_error() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match=r"none of the 4 parameters .*\n.*loss.backward\(\)"):
        Lost(net, torch.optim.SGD(net.parameters(), lr=0.1))(*batch(0))


def test_a_graph_without_build_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="Graph.build: it is not written"):
        consistent.nn.Graph()()


def test_batches_that_cannot_be_cut() -> None:
    net = Net()
    graph = graph_of(net, micro_batches=4)
    x, y = batch(0)
    with pytest.raises(ValueError, match=r"\[7, 8\] rows in dim 0"):
        graph(x, y[1:])
    with pytest.raises(ValueError, match="3 rows is to be cut into 4 micro-batches"):
        graph(x[:3], y[:3])


def test_config_says_what_it_takes() -> None:
    config = consistent.nn.Graph().config
    with pytest.raises(ValueError, match="value is 0"):
        config.set_gradient_accumulation_steps(0)
    with pytest.raises(ValueError, match="stage is 4"):
        config.enable_zero(stage=4)
    with pytest.raises(ValueError, match="'gpip' is not known. Did you mean 'gpipe'"):
        config.set_schedule("gpip")
    config.set_schedule("GPipe")
    with pytest.raises(TypeError, match="optim is a int"):
        consistent.nn.Graph().add_optimizer(1)  # type: ignore[arg-type]


STAGES = {
    "gap": [(0, [0]), (2, [1])],
    "two places": [(0, [0]), (0, [1])],
    "some ranks": [(0, [0, 1]), (1, [1, 2])],
}
SAID = {
    "gap": "stages [0, 2] are given, and stage 1 is not",
    "two places": 'stage 0 is on placement("cpu", ranks=[0]) and on placement("cpu", ranks=[1])',
    "some ranks": "they share rank 1 but not all ranks",
}


@pytest.mark.parametrize("name", STAGES)
@on_ranks(3)
def test_stages_that_do_not_fit(rank: int, name: str) -> None:
    net = Net()
    for module, (index, ranks) in zip((net.first, net.second), STAGES[name], strict=True):
        consistent.nn.Graph.stage(module, index, Placement("cpu", ranks))
    with pytest.raises(ValueError) as raised:
        graph_of(net)(*batch(0))
    assert SAID[name] in str(raised.value)


def test_set_stage_wants_both() -> None:
    part = consistent.nn.graph.GraphModule(Net())
    with pytest.raises(ValueError, match="placement is None. Give both"):
        part.set_stage(0)
    with pytest.raises(ValueError, match="stage_id is -1"):
        part.set_stage(-1, Placement("cpu", [0]))
    part.set_stage(stage_id=1, placement=Placement("cpu", [0]))
    assert str(part.stage) == 'stage 1 on placement("cpu", ranks=[0])'
