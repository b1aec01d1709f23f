"""What estimates and strategies are put together from."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from consistent import B, S
from consistent.auto.simulation.calls import Blank, fill_blanks
from consistent.auto.strategies.estimates import RangeMax, StrategyChoice
from consistent.auto.strategies.strategy import strategy_for


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_the_highest_of_every_run(values: list[int]) -> None:
    highest = RangeMax(values)
    for begin in range(len(values)):
        for end in range(begin + 1, len(values) + 1):
            assert highest.max_in(begin, end) == max(values[begin:end])


class Cache:
    """Something that a unit is given and that holds tensors."""

    def __init__(self, held: object) -> None:
        self.held = held


def test_blanks_are_filled_wherever_they_are() -> None:
    blank = Blank((2,), torch.float32, False)
    given = ([blank], {"cache": Cache({"keys": blank})})
    made = fill_blanks(given, lambda x: x.shape)
    assert made[0] == [(2,)] and made[1]["cache"].held == {"keys": (2,)}
    assert given[1]["cache"].held == {"keys": blank}  # type: ignore[attr-defined]


class Speaker(nn.Module):
    """Predicts one of 16 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_head_in_a_stage_of_its_own_is_split() -> None:
    choice = StrategyChoice(2, 2, 1, "data", False, False, 2, 2)
    made = strategy_for(Speaker(), choice, ["blocks.1"], [], "cpu")
    assert made.plan.tensors["head.weight"].sbp == (S(0),)
    assert made.plan.tensors["blocks.1.bias"].sbp in ((B,), (S(0),))
