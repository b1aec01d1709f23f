"""What a step may read while it is followed: what one accepts is accepted by all.

A plan, a pipeline and a simulation follow a step without its values. They know those that follow
from sizes, and from whole numbers and truth values among the arguments. Compiled steps know those
that follow from sizes alone, since a program serves other arguments too; they run the rest as it is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consistent import B, Placement, compile, distribute, parallelize, search, simulate
from consistent.nn import pipeline
from consistent.nn.planners.layout_search import best_plan
from tests.each_of import each_of
from tests.ranks import on_ranks
from tests.ranks import simulate as on_threads
from tests.twins import assert_same

Read = Callable[[Tensor, Tensor], Any]

BY_SIZES: dict[str, Read] = {
    "shape": lambda x, t: x * x.shape[0],
    "numel": lambda x, t: x / t.numel(),
    "item": lambda x, t: x + int(torch.arange(t.shape[1]).sum()),
    "tolist": lambda x, t: x * sum(torch.arange(3).tolist()),
    "len": lambda x, t: x * len(t),
    "bool": lambda x, t: x if bool((torch.ones(3) > 0).all()) else -x,
    "float": lambda x, t: x * float(torch.linspace(0, 1, 4)[1]),
    "mask": lambda x, t: x[:, torch.arange(t.shape[1]) < 2],
    "masked_select": lambda x, t: x + torch.masked_select(x, torch.arange(4) > 1).sum(),
    "tensor_split": lambda x, t: torch.tensor_split(x, torch.tensor([2]), 1)[0],
    "repeat_interleave": lambda x, t: torch.repeat_interleave(x, torch.arange(t.shape[1]), 1),
}
BY_VALUES: dict[str, Read] = {
    "all": lambda x, t: x if bool((t >= 0).all()) else -x,
    "any": lambda x, t: x if (t == 7).any() else -x,
    "max": lambda x, t: x * int(t.max()),
    "item": lambda x, t: x * t[0, 0].item(),
    "tolist": lambda x, t: x * sum(t[0].tolist()),
    "numpy": lambda x, t: x * float(t[0].numpy().sum()),
    "iterate": lambda x, t: x * sum(int(row[0]) for row in t),
    "contains": lambda x, t: x if 3 in t else -x,
    "format": lambda x, t: x if f"{t[0, 0]}" == "1" else -x,
    "equal": lambda x, t: x if torch.equal(t, t.sort(1)[0]) else -x,
    "slice": lambda x, t: x[:, : int(t.max()) % 3 + 1],
    "lengths": lambda x, t: x + sum(x[0, : n + 1].sum() for n in t[:, 0].tolist()),
    "split": lambda x, t: torch.split(x, [int(t[0, 0]), 4 - int(t[0, 0])], 1)[0],
    "mask": lambda x, t: x[t > 2],
    "mask by a plain tensor": lambda x, t: x[t > torch.arange(4)],
    "mask of a mask": lambda x, t: x[t > 2][(t > 4)[t > 2]],
    "write by a mask": lambda x, t: torch.relu(x).index_put((t > 2,), torch.zeros(()).double()),
    "masked_select": lambda x, t: x + torch.masked_select(x, (t > 2).unsqueeze(-1)).sum(),
    "nonzero": lambda x, t: x.flatten(0, 1)[(t.flatten() > 2).nonzero()[:, 0]],
    "argwhere": lambda x, t: x[tuple(torch.argwhere(t > 2).T)],
    "where": lambda x, t: x[torch.where(t > 2)],
    "unique": lambda x, t: x * len(torch.unique(t)),
    "unique_consecutive": lambda x, t: x * torch.unique_consecutive(t).numel(),
    "bincount": lambda x, t: x * len(torch.bincount(t.flatten())),
    "repeat_interleave": lambda x, t: torch.repeat_interleave(x, t[0] + 1, 1),
    "tensor_split": lambda x, t: torch.tensor_split(x, t[0, :2].sort()[0], 1)[1],
}
# They depend on floats, which nobody knows in advance.
UNKNOWN: dict[str, Read] = {
    "item": lambda x, t: x * x.detach().sum().item(),
    "if": lambda x, t: x if x.sum() > 0 else -x,
    "tolist": lambda x, t: x * sum(x.detach()[0, 0].tolist()),
    "mask": lambda x, t: x + x[x > 0].sum(),
    "nonzero": lambda x, t: x * len(x.nonzero()),
    "unique": lambda x, t: x * len(torch.unique(x.detach())),
}
ALL = {"sizes": BY_SIZES, "values": BY_VALUES, "floats": UNKNOWN}
KNOWN = [(kind, name) for kind in ("sizes", "values") for name in ALL[kind]]


class Net(nn.Module):
    """An embedding, a step that reads, and a layer."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.read = ALL[kind][name]
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.read(self.first(tokens), tokens)).square().sum()


TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [0, 1, 5, 6], [2, 2, 2, 7]])
OTHERS = torch.tensor([[2, 5, 5, 1], [0, 3, 3, 6], [3, 0, 1, 1], [1, 7, 7, 2]])


def planned(kind: str, name: str) -> Any:
    """The plan that is found for the step."""
    net = Net(kind, name)
    return best_plan(lambda net, t: net(t).backward(), Placement("cpu", range(2)), (net, TOKENS))


@each_of(("kind", "name"), KNOWN)
def test_a_plan_is_found(kind: str, name: str) -> None:
    plan, nets = planned(kind, name), [Net(kind, name) for _ in range(2)]

    def on_rank(rank: int) -> Tensor:
        p = Placement("cpu", range(2))
        net = parallelize(nets[rank], p, plan, inputs=B, verbose=False)
        return net(distribute(OTHERS, p, B)).full()

    for loss in on_threads(on_rank, 2):
        assert_same(loss, Net(kind, name)(OTHERS))


@each_of(("kind", "name"), KNOWN)
@on_ranks(2)
def test_a_pipeline_asks_again_for_each_batch(rank: int, kind: str, name: str) -> None:
    plain, net = Net(kind, name), Net(kind, name)
    stages = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(net, stages, ["second"], loss=lambda out, _: out, micro_batches=2)
    for tokens in (TOKENS, OTHERS, TOKENS):
        plain.zero_grad()
        net.zero_grad()
        wanted = [plain(part) / 2 for part in tokens.chunk(2)]
        torch.autograd.backward(wanted)
        assert_same(pipe.step(tokens, tokens), sum(wanted))
        mine: Any
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            if mine.placement == stages[rank]:
                assert_same(mine.grad.to_local(), other.grad)


class Touch(torch.autograd.Function):
    """Writes into its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        mask.add_(1)
        ctx.mark_dirty(mask)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@torch.library.custom_op("tests::touch", mutates_args={"mask"})
def touch(x: Tensor, mask: Tensor) -> Tensor:
    mask.add_(1)
    return x.clone()


@touch.register_fake
def _(x: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(x)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "zero_": lambda mask, t: mask.zero_(),
    "copy_": lambda mask, t: mask.copy_(t),
    "view": lambda mask, t: mask.view(-1)[:3].fill_(0),
    "index_put_": lambda mask, t: mask.index_put_((t > 2,), torch.tensor(5)),
    "list op": lambda mask, t: torch._foreach_zero_([mask]),  # pyright: ignore
    "function": lambda mask, t: Touch.apply(t, mask),
    "custom op": lambda mask, t: touch(t, mask),
    "out": lambda mask, t: torch.add(t, 1, out=mask),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_value_is_unknown_once_it_is_written(write: str) -> None:
    def step(net: Net, t: Tensor) -> None:
        mask = t * 2
        assert int(mask.sum()) == int(TOKENS.sum()) * 2
        WRITES[write](mask, t)
        int(mask.sum())

    net = Net("sizes", "shape")
    with pytest.raises(ValueError, match="reads a value of a tensor"):
        best_plan(step, Placement("cpu", range(2)), (net, TOKENS))


def look_up(x: Tensor, t: Tensor) -> Tensor:
    try:
        return x * int(torch.arange(7)[t].sum())
    except IndexError:
        return -x


@on_ranks(2)
def test_a_question_that_raises_for_other_values_records_again(rank: int) -> None:
    BY_VALUES["raises"] = look_up
    try:
        net, plain = Net("values", "raises"), Net("values", "raises")
    finally:
        del BY_VALUES["raises"]
    stages = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(net, stages, ["second"], loss=lambda out, _: out, micro_batches=1)
    for tokens in (TOKENS.clamp(max=5), OTHERS, TOKENS.clamp(max=5)):
        assert_same(pipe.step(tokens, tokens), plain(tokens).detach())


@on_ranks(2)
def test_a_module_of_a_stage_reads_no_values(rank: int) -> None:
    stages = [Placement("cpu", [0]), Placement("cpu", [1])]
    net = nn.Sequential(Net("values", "max"), nn.Linear(1, 1).double())
    pipe = pipeline(net, stages, ["1"], loss=lambda out, _: out.sum(), micro_batches=1)
    with pytest.raises(RuntimeError, match="meta"):
        pipe.step(TOKENS, TOKENS)


def _simulated(kind: str, name: str) -> None:
    with simulate(ranks=2, machine="a100-8") as simulation:
        p = Placement("cuda", range(2))
        # Wide, so that its values are not kept.
        net = Net(kind, name)
        net.first = nn.Embedding(8192, 4).double()
        parallelize(net, p, "data", verbose=False)
        net(distribute(TOKENS, p, B)).backward()
        assert simulation.report().seconds > 0


@each_of(("kind", "name"), KNOWN)
def test_a_step_is_simulated(kind: str, name: str) -> None:
    _simulated(kind, name)


@pytest.mark.parametrize("name", ["max", "mask", "unique", "repeat_interleave"])
def test_a_strategy_is_found(name: str) -> None:
    made = search(Net("values", name), 2, TOKENS, loss=lambda out, _: out, machine="a100-8")
    assert made.tried


@each_of(("kind", "name"), [*KNOWN, *(("floats", name) for name in UNKNOWN)])
@on_ranks(2)
def test_a_compiled_step_is_right_and_a_program_if_sizes_decide(
    rank: int, kind: str, name: str
) -> None:
    p = Placement("cpu", range(2))
    net = parallelize(Net(kind, name), p, "data", verbose=False)

    def step(tokens: Any) -> Any:
        loss = net(tokens)
        loss.backward()
        return loss

    program = compile(step, backend="ops")
    for tokens in (TOKENS, TOKENS, TOKENS, OTHERS):
        assert_same(program(distribute(tokens, p, B)).full(), Net(kind, name)(tokens))
    # Where a mask writes, no size depends on it.
    is_program = kind == "sizes" or name == "write by a mask"
    assert ("not a program" in program.show()) != is_program


@each_of("name", UNKNOWN)
def test_a_plan_says_which_read_it_cannot_follow(name: str) -> None:
    with pytest.raises(ValueError, match="reads a value of a tensor while it runs"):
        planned("floats", name)


@each_of("name", UNKNOWN)
@on_ranks(2)
def test_a_pipeline_says_which_read_it_cannot_follow(rank: int, name: str) -> None:
    stages = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(
        Net("floats", name), stages, ["second"], loss=lambda out, _: out, micro_batches=2
    )
    with pytest.raises(RuntimeError, match=r"recorded (once, )?without values"):
        pipe.step(TOKENS, TOKENS)
