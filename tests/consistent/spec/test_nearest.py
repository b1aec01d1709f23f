"""Suggestions in messages about names that were mistyped."""

from __future__ import annotations

import pytest
import torch

import consistent
from consistent.compiled import CompileOptions
from consistent.nn import Plan
from consistent.pipeline.schedules import schedule_kind
from consistent.spec.nearest import suggestion

HERE = consistent.placement("cpu", [0])


def test_the_nearest_name_is_suggested_in_letters_of_any_size() -> None:
    assert suggestion("ZeRO-3", ["zero1", "zero3", "data"]) == " Did you mean 'zero3'?"
    assert suggestion("qwerty", ["zero3", "data"]) == suggestion(None, ["data"]) == ""


@pytest.mark.parametrize(
    ("mistyped", "near"), [("zreo3", "zero3"), ("tensor_sequence", "tensor+sequence")]
)
def test_a_mistyped_plan(mistyped: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no plan '{mistyped}'. Did you mean '{near[:6]}"):
        consistent.parallelize(torch.nn.Linear(2, 2), HERE, mistyped)


def test_a_mistyped_schedule() -> None:
    with pytest.raises(ValueError, match="'1fb1' is not known. Did you mean '1f1b'"):
        schedule_kind("1fb1")


def test_a_mistyped_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'inductr'. Did you mean 'inductor'"):
        CompileOptions(backend="inductr", what="compile")


def test_a_mistyped_entry_of_a_plan() -> None:
    with pytest.raises(ValueError, match="Did you mean 'step'"):
        Plan({"weight": {"sbp": "B", "stepp": "S(0)"}})
    with pytest.raises(ValueError, match="Did you mean 'inputs'"):
        Plan(modules={"fc": {"input": {0: "B"}}})
