"""Where models are cut."""

from __future__ import annotations

import pytest
from torch import nn

from consistent.pipeline.cut import Cut, candidate_units, cut_at_names, cut_balanced

from .gpt import GPT


def names(cut: Cut) -> list[list[str]]:
    return [[unit.name for unit in units] for units in cut.stages]


def test_a_stage_begins_at_each_name() -> None:
    assert names(cut_at_names(GPT(3), ["blocks.1", "norm"])) == [
        ["words", "places", "blocks.0"],
        ["blocks.1", "blocks.2"],
        ["norm", "head"],
    ]


def test_a_name_inside_a_block_opens_it() -> None:
    first, second = names(cut_at_names(GPT(2), ["blocks.1.fc1"]))
    assert first[-1] == "blocks.1.o" and second[0] == "blocks.1.fc1"


def test_balanced_makes_the_dearest_stage_cheapest() -> None:
    costs = {"0": 1.0, "1": 5.0, "2": 1.0, "3": 1.0, "4": 1.0, "5": 1.0}
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in costs))
    cut = cut_balanced(model, candidate_units(model, 3), 3, lambda unit: costs[unit.name])
    assert names(cut) == [["0"], ["1"], ["2", "3", "4", "5"]]


def test_parameters_above_the_parts_go_with_the_first_part_inside() -> None:
    model = GPT(2)
    model.extra = nn.Parameter(model.head.weight.detach().clone())
    assert {n: stage for n, (_, stage) in cut_at_names(model, ["norm"]).owners.items()} == {"": 0}


@pytest.mark.parametrize(
    "split, said",
    [
        (["blocks.9"], "names 'blocks.9', which is not a module of GPT"),
        (["words"], r"stages would begin at parts \[0\]"),
        (["norm", "blocks.1"], r"stages would begin at parts \[4, 3\]"),
        (["norm", "norm"], r"parts \[4, 4\]"),
    ],
)
def test_names_that_cut_nothing(split: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cut_at_names(GPT(2), split)


def test_too_few_parts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="cut into 3 stages, and it has 2 parts: 0, 1"):
        cut_balanced(model, candidate_units(model, 3), 3, lambda unit: 1.0)
