"""Programs as they are recorded, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from consistent import B, Placement, S, distribute, parallelize, randn, zeros
from consistent.graph.entering import entered
from consistent.graph.program import StagesProgram
from consistent.graph.record import record
from consistent.spec import TensorSpec
from mirrored.transports.counting import counting
from tests.ranks import on_ranks

ONE, TWO = Placement("cpu", [0]), Placement("cpu", [1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.first(x)) + torch.arange(3)
        return self.second(y) * x.shape[0]


def recorded(net: nn.Module, step: Any, *args: Any, moves: bool = True) -> StagesProgram:
    stages = {id(net.first): 0, id(net.second): 1}
    return record(
        "Net",
        step,
        args,
        {},
        modules=list(net.modules()),
        stages={0: ONE, 1: TWO},
        stage_of=lambda m: stages.get(id(m)),
        layout_of=lambda stage, shape: (S(0),) if shape and shape[0] == 5 else (B,),
        moves=moves,
    )


def placed() -> Net:
    torch.manual_seed(0)
    net = Net()
    parallelize(net.first, ONE)
    parallelize(net.second, TWO)
    return net


TEXT = """\
%0 = input
%1 = run entered(%0, spec=f32[5, 4] S(0) on placement("cpu", ranks=[0]))           stage 0
%2 = call Linear(%1)                                                               stage 0
%3 = run relu(%2)                                                                  stage 0
%4 = run arange(3)                                                                 any stage
%5 = run add(%3, %4)                                                               stage 0
%6 = move %5 to f32[5, 3] S(0) on placement("cpu", ranks=[1])                      stage 0 -> 1
%7 = call Linear(%6)                                                               stage 1
%8 = run mul(%7, 5)                                                                stage 1
return %8"""


@on_ranks(2)
def test_a_program_reads_like_the_model_and_nothing_is_sent_for_it(rank: int) -> None:
    net = placed()
    with counting() as log:
        program = recorded(net, net, torch.zeros(5, 4))
    text = "\n".join(" ".join(line.split()) for line in str(program).splitlines())
    assert text == "\n".join(" ".join(line.split()) for line in TEXT.splitlines())
    assert not log.calls
    assert [program.values[i].requires_grad for i in (0, 2, 4, 6)] == [False, True, False, True]


@on_ranks(2)
def test_parameters_and_random_state_stay_what_they_are(rank: int) -> None:
    net = placed()
    before = {n: p for n, p in net.named_parameters()}

    def step(x: Any) -> Any:
        return nn.functional.dropout(net(x), 0.5)

    state = torch.get_rng_state()
    program = recorded(net, step, torch.zeros(5, 4))
    assert program.draws == 1 and torch.equal(torch.get_rng_state(), state)
    assert all(p is before[n] for n, p in net.named_parameters())
    assert all("_compiled_call_impl" not in vars(m) for m in net.modules())


def by_value(net: Any, x: Any) -> Any:
    return net(x) if x.sum() > 0 else x


def by_result(net: Any, x: Any) -> Any:
    y = net.first(x)
    return y if y.sum().item() > 0 else net.second(y)


def backwards(net: Any, x: Any) -> Any:
    return net.first(net.second(net.first(x))[:, :1].expand(-1, 4))


def made(net: Any, x: Any) -> Any:
    return zeros(3, placement=ONE, sbp=B) * 2


def elsewhere(net: Any, x: Any) -> Any:
    return net.elsewhere * 2


def plainly(net: Any, x: Any) -> Any:
    return net(x) * net.plain


def rows(net: Any, x: Any) -> Any:
    y = net(x)
    y.backward(torch.ones(5, 2))
    return y


FAULTS = {
    by_value: "meta",
    by_result: "a tensor's values or its shard are asked for",
    backwards: "Linear, called at .* is in stage 0 and is given what stage 1 makes",
    made: "a global tensor is used that was made, or laid out again, in the program",
    elsewhere: "a tensor is on .*where no stage is: stage 0 is on",
    plainly: "a plain tensor of shape .2,. that requires grad",
    rows: r"backward of a tensor of shape \(5, 2\)",
}


@pytest.mark.parametrize("step", FAULTS, ids=lambda f: f.__name__)
@on_ranks(2)
def test_what_cannot_be_recorded_names_the_line(rank: int, step: Any) -> None:
    net: Any = placed()
    net.plain = nn.Parameter(torch.ones(2))
    net.elsewhere = randn(3, placement=Placement("cpu", [0, 1]), sbp=B)
    with pytest.raises((RuntimeError, ValueError), match=FAULTS[step]) as raised:
        recorded(net, lambda x: step(net, x), torch.ones(5, 4))
    notes = "".join(raised.value.__notes__)
    assert "while Net was recorded, at" in notes and "test_record.py:" in notes


@on_ranks(2)
def test_without_moves_the_program_has_to_move(rank: int) -> None:
    net = placed()
    with pytest.raises(RuntimeError, match="Move it first: x.to_global"):
        recorded(net, net, distribute(torch.ones(5, 4), ONE, B), moves=False)


def layer_drop(net: Any, x: Any) -> Any:
    return net(x) if torch.rand([]) < 0.5 else net.first(x)


def noise(net: Any, x: Any) -> Any:
    return net.second(net.first(x + torch.randn_like(x)))


def plain_dropout(net: Any, x: Any) -> Any:
    return net(nn.functional.dropout(x))


@pytest.mark.parametrize("step", [layer_drop, noise, plain_dropout], ids=lambda f: f.__name__)
@on_ranks(2)
def test_plain_random_numbers_between_stages_are_refused(rank: int, step: Any) -> None:
    net = placed()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="Draw it inside a stage's module, or pass it as an"):
        recorded(net, lambda x: step(net, x), torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_what_draws_nothing_may_follow_from_sizes(rank: int) -> None:
    net = placed()

    def step(x: Any) -> Any:
        y = nn.functional.dropout(x, 0.5, training=False)
        mask = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        return net(y + mask[0])

    recorded(net, step, torch.ones(5, 4))


def setitem(h: Any) -> None:
    h[:, 0] = 0


def inplace_argument(h: Any) -> None:
    nn.functional.relu(h, inplace=True)


def through_a_view(h: Any) -> None:
    h[:, 1].zero_()


WRITES = {f.__name__: f for f in (setitem, inplace_argument, through_a_view)}


@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_a_write_into_what_was_moved_names_both_lines(rank: int, write: str) -> None:
    net = placed()

    def step(x: Any) -> Any:
        h = net.first(x)
        y = net.second(h)
        WRITES[write](h)
        return y + net.second(h)

    with pytest.raises(RuntimeError, match="writes into a tensor that stage 1 was given before"):
        recorded(net, step, torch.ones(5, 4))


@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_a_write_before_the_move_is_recorded_as_one(rank: int, write: str) -> None:
    net = placed()

    def step(x: Any) -> Any:
        h = net.first(x) * 1
        WRITES[write](h)
        return net.second(h)

    program = recorded(net, step, torch.ones(5, 4))
    assert [line.stage for line in program.lines if line.writes] == [0]


class Writing(nn.Module):
    """Its stages write into what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LeakyReLU(0.2, inplace=True)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))


def given_twice(net: Any, x: Any) -> Any:
    return net.second(net.first(x) + x)


def later_alone(net: Any, x: Any) -> Any:
    net.first(x)
    return net.second(x)


def plainly_after(net: Any, x: Any) -> Any:
    y = net.first(x)
    return net.second(y), x + 1


def handed_on(net: Any, x: Any) -> Any:
    y = net.first(x) * 2
    return net.second(y)


def old_returned(net: Any, x: Any) -> Any:
    y = net.first(x) * 2
    return net.second(y), y


READS = {f.__name__: f for f in (given_twice, later_alone, plainly_after, old_returned)}


@pytest.mark.parametrize("step", READS)
@on_ranks(2)
def test_what_a_stages_module_wrote_into_is_not_read_elsewhere(rank: int, step: str) -> None:
    net: Any = Writing()
    parallelize(net.second, TWO)
    with pytest.raises(RuntimeError, match="uses a tensor into which stage . has written, in "):
        recorded(net, lambda x: READS[step](net, x), torch.ones(5, 4))


@on_ranks(2)
def test_a_stage_may_write_into_what_it_is_given(rank: int) -> None:
    net: Any = Writing()
    parallelize(net.second, TWO)
    program = recorded(net, lambda x: handed_on(net, x), torch.ones(5, 4))
    assert [line.writes for line in program.lines if line.is_module] == [True, True]


@on_ranks(2)
def test_what_a_module_makes_is_compared_between_the_ranks_of_its_stage(rank: int) -> None:
    spec = TensorSpec.of(Placement("cpu", [0, 1]), (S(0),), (4,), torch.float32)
    with pytest.raises(RuntimeError, match="the ranks have different ones"):
        entered(torch.arange(4.0) + rank, spec, made_by="Differs")
    with pytest.raises(RuntimeError, match="Grows: it returns a plain tensor, torch.float32.5."):
        entered(torch.arange(5.0), spec, made_by="Grows")
    assert torch.equal(entered(torch.arange(4.0), spec, made_by="Same").full(), torch.arange(4.0))
