"""A plan prints, is saved and loaded, and each wrong one is an error that says what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, Plan, S
from consistent.nn import Layouts
from consistent.nn.planners import plan_for
from consistent.nn.slots import plain_slots


class Blocks(nn.Module):
    """Three equal blocks, an embedding tied to the head, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in "abc")
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


def planned(given: Any, axes: tuple[str, ...] | None = None, ranks: Any = 0) -> Plan:
    module = Blocks()
    return plan_for(module, plain_slots(module), Placement("cpu", ranks, axes=axes), given)


def on_two(given: Any, axes: tuple[str, ...] | None = ("dp", "tp")) -> Plan:
    return planned(given, axes, [[0]])


def test_each_axis_fills_its_own_entry() -> None:
    plan = on_two({"dp": "zero3", "tp": {"blocks.*.0.weight": S(0), "*.1.weight": S(1)}})
    assert plan.layouts("blocks.1.0.weight") == Layouts((S(1), S(0)), use=(B, S(0)))
    assert plan.layouts("blocks.1.1.weight") == Layouts((S(0), S(1)), use=(B, S(1)))
    assert plan.layouts("head.weight") == Layouts((S(0), B), use=(B, B))
    assert plan.layouts("calls") == Layouts((B, B))
    swapped = on_two({"tp": "zero3", "dp": {"blocks.*.0.weight": S(0)}})
    assert swapped.layouts("blocks.0.0.weight") == Layouts((S(0), S(1)), use=(S(0), B))


def test_without_names_the_order_is_that_of_the_axes() -> None:
    plan = on_two({"replicas": "data", "shards": "zero2"}, axes=None)
    both = (B, S(0))
    assert plan.layouts("embed.weight") == Layouts((B, B), grad=both, step=both)


@pytest.mark.parametrize("axes", [("dp", "tp"), None])
def test_a_saved_plan_is_loaded_as_it_was(tmp_path: Path, axes: Any) -> None:
    given = {
        "dp": {"blocks.1.*": S(0)},
        "tp": Plan(
            {"head.weight": S(0)},
            {"blocks.*": {"inputs": {0: S(1)}, "outputs": B}, "blocks.0.1": {"outputs": S(0)}},
        ),
    }
    plan = on_two(given, axes)
    text = plan.save(tmp_path / "plan.yaml").read_text()
    again = on_two(Plan.load(tmp_path / "plan.yaml"), axes)
    assert again == plan and str(again) == str(plan)
    assert "(-, S(1))" in text and "blocks.*" in text


def test_what_a_plan_keeps_is_saved_printed_and_compared(tmp_path: Path) -> None:
    usual, other = planned("zero3"), planned(Plan({"*": S(0)}, keep_bytes=7))
    assert "keep_bytes" not in usual.save(tmp_path / "usual.yaml").read_text() + str(usual)
    assert Plan.load(tmp_path / "usual.yaml").keep_bytes == usual.keep_bytes
    again = Plan.load(other.save(tmp_path / "other.yaml"))
    assert again.keep_bytes == other.keep_bytes == 7 and "keep_bytes: 7" in str(other)
    assert other != planned(Plan({"*": S(0)}))
    assert on_two({"dp": other, "tp": "data"}).keep_bytes == 7
    assert other.part(["calls"], []).keep_bytes == other.on(Placement("cpu", [0])).keep_bytes == 7
    for wrong in ("-1", "1.5", "true", "many"):
        (tmp_path / "x.yaml").write_text(f"tensors: {{}}\nkeep_bytes: {wrong}\n")
        with pytest.raises(ValueError, match="it is a number of bytes, 0 or more"):
            Plan.load(tmp_path / "x.yaml")


def test_what_repeats_is_saved_as_one_line_and_may_be_edited(tmp_path: Path) -> None:
    path = planned("zero3").save(tmp_path / "plan.yaml")
    text = path.read_text()
    assert text.count("blocks") == 2, text
    path.write_text(text.replace("blocks.*.*.bias", "blocks.2.*.bias"))
    plan = planned(Plan.load(path))
    assert plan.layouts("blocks.1.0.bias") == Layouts((B,))
    assert plan.layouts("blocks.2.0.bias") == Layouts((S(0),), use=(B,))


def test_a_plan_prints_one_line_for_what_repeats() -> None:
    lines = str(planned({"blocks.*.0.*": S(0)})).splitlines()
    del lines[1]
    assert [line.split() for line in lines] == [
        ["tensor", "shape", "lies"],
        ["calls", "[]", "B"],
        ["embed.weight", "=", "head.weight", "[7,", "4]", "B"],
        ["blocks.{0-2}.0.weight", "3x", "[8,", "4]", "S(0)"],
        ["blocks.{0-2}.0.bias", "3x", "[8]", "S(0)"],
        ["blocks.{0-2}.1.weight", "3x", "[4,", "8]", "B"],
        ["blocks.{0-2}.1.bias", "3x", "[4]", "B"],
    ]
    assert "used" in str(planned("zero3"))


@pytest.mark.parametrize(
    ("given", "axes", "words"),
    [
        ("zer3", None, "no plan 'zer3'. Did you mean 'zero3'"),
        ({"dp": "zero3", "tpp": "data"}, ("dp", "tp"), "axis 'tpp'.*Did you mean 'tp'"),
        ({"dp": "datta", "tp": "data"}, ("dp", "tp"), "no plan 'datta'. Did you mean 'data'"),
        ("zero3", ("dp", "tp"), "is for one axis.*'dp': 'zero3', 'tp': 'data'"),
        ({"blocks.*.0.wieght": S(0)}, None, "matches no .* Did you mean 'blocks.2.0.weight'"),
        (Plan({}, {"block.0": {"outputs": B}}), None, "not a module .*Did you mean 'blocks.0'"),
        (Plan({}, {"blocks.0": {"outputs": (B, B)}}), None, "2 SBPs.* 1 axes"),
        (1.5, None, "Give a name"),
        (0, None, r"says how one tensor lies.*Give patterns -> SBP, such as \{'\*': 0\}"),
        ("S(0)", None, r"such as \{'\*': 'S\(0\)'\}"),
        ({"dp": S(0), "tp": "tensor"}, ("dp", "tp"), r"such as \{'\*': S\(0\)\}"),
    ],
)
def test_a_wrong_plan_is_an_error_that_says_what_is_right(
    given: Any, axes: Any, words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        planned(given, axes, [[0]] if axes else [0])


def test_an_entry_without_sbp_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not say how a tensor lies"):
        Plan({"embed.weight": {"use": B}})


def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path) -> None:
    for text in ("a: [", "[1, 2]", "tensorz: {}"):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ValueError, match="x.yaml is not"):
            Plan.load(tmp_path / "x.yaml")


def test_the_plan_of_a_module_is_what_was_decided(capsys: Any) -> None:
    module = consistent.parallelize(nn.Linear(2, 2), Placement("cpu", 0), verbose=True)
    assert "weight" in capsys.readouterr().out
    assert consistent.plan_of(module).layouts("bias") == Layouts((B,))
    with pytest.raises(ValueError, match="was not parallelized"):
        consistent.plan_of(nn.Linear(2, 2))
