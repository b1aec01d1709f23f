"""An unchanged module trains as it does alone, whatever the plan; a wrong plan changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, GlobalTensor, S
from tests.consistent.tensor.twins import GRIDS, Laid, assert_same, compare, randn
from tests.ranks import pool


class _Tied(nn.Module):
    """A tied embedding, buffers, a frozen parameter, an empty slot and a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_parameter("none", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids) * self.scale + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


PLANS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "everything": {
        "embed.weight": S(0),
        "head.weight": S(0),
        "blocks.*": S(0),
        "scale": S(0),
        "shift": S(0),
    },
    "first_match_counts": {"blocks.0.*": S(0), "blocks.?.weight": S(1), "*": B},
}


def _trained(at: Laid, plan: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = at.module(_Tied().double(), plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 2]])
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(at(ids, S(0))).flatten(0, 1), at(ids.flip(1), S(0)).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss)
    assert model.head.weight is model.embed.weight and model.none is None
    assert model.scale.grad is None
    model.eval()
    return (
        losses,
        model.state_dict(),
        [p.grad for p in model.parameters()],
        model.calls,
        copy.deepcopy(model)(at(ids, B)),
    )


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_a_module_trains_as_it_does_alone(plan: str, world: int) -> None:
    pool(world).run(compare, _trained, GRIDS[world], PLANS[plan])


def _normalised(at: Laid) -> Any:
    torch.manual_seed(0)
    net = at.module(
        nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
        ).double()
    )
    y = net(at(randn(5, 2, 5), S(0)))
    y.square().sum().backward()
    return y, net.state_dict(), [p.grad for p in net.parameters()]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_buffers_follow_the_whole_batch(world: int) -> None:
    pool(world).run(compare, _normalised, GRIDS[world])


def _kinds(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    model = _Tied()
    same = consistent.parallelize(
        model, p, {"embed.weight": S(0), "head.weight": S(0), "blocks.*.bias": S(-1)}
    )
    assert same is model
    for _, value in [*model.named_parameters(), *model.named_buffers()]:
        assert type(value) is GlobalTensor
    assert (
        all(isinstance(v, nn.Parameter) for v in model.parameters())
        and len(list(model.parameters())) == 6
    )
    assert (
        model.embed.weight.sbp == (S(0),)
        and model.blocks[1].bias.sbp == (S(0),)
        and model.shift.sbp == (B,)
    )
    assert not model.scale.requires_grad and model.blocks[0].weight.requires_grad
    before = dict(model.named_parameters())
    consistent.parallelize(model, p)  # what is global stays as it is
    assert all(before[k] is v for k, v in model.named_parameters())


def test_parameters_and_buffers_become_global() -> None:
    pool(2).run(_kinds)


def _refused(rank: int, plan: dict[str, Any], change: bool) -> str:
    p = consistent.placement("cpu", [0, 1])
    torch.manual_seed(0)
    model = _Tied()
    if change:  # the last parameter alone
        model.blocks[1].bias.data += rank
    before = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    try:
        consistent.parallelize(model, p, plan, check=change)
    except (ValueError, RuntimeError) as error:
        for key, value in model.state_dict(keep_vars=True).items():
            assert value is before[key][0] and type(value) is not GlobalTensor
            assert_same(value, before[key][1])
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"blocks.*": S(0), "decoder.*": S(0)},
            ["'decoder.*'", "matches no parameter", "named_parameters"],
        ),
        ({"scale": S(1)}, ["'scale'", "S(1)", "Split one of its dims"]),
        ({"calls": S(0)}, ["'calls'", "no dim to split"]),
        ({"scale": (S(0), B)}, ["'scale'", "2 entries"]),
        (
            {"embed.weight": S(0), "head.weight": S(1)},
            ["'embed.weight'", "'head.weight'", "tied", "same SBP"],
        ),
        ({"blocks.*": "S(x)"}, ["S(x)", "^"]),
    ],
)
def test_a_wrong_plan_is_an_error_and_changes_nothing(
    plan: dict[str, Any], words: list[str]
) -> None:
    for message in pool(2).run(_refused, plan, False):
        assert all(word in message for word in words), message


def test_check_finds_modules_that_differ_between_ranks() -> None:
    for message in pool(2).run(_refused, {}, True):
        assert "differ" in message, message
