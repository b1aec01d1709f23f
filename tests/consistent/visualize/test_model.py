"""visualize(model): parameters by module, layouts, bytes; layers that are alike are one line."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

import consistent
from consistent import B, S
from tests.ranks import pool


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(5))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


PLAN = {
    "tok.weight": S(0),
    "*.up.weight": S(0),
    "*.down.weight": {"sbp": S(1), "use": B},
    "blocks.4.up.weight": B,
}


def _text(rank: int) -> Any:
    model = consistent.parallelize(_Model(), consistent.placement("cpu", [0, 1]), PLAN)
    picture: Any = consistent.visualize(model)
    ElementTree.fromstring(picture.svg())
    held = sum(x.to_local().nbytes for x in [*model.parameters(), *model.buffers()])
    return picture.text(), picture.tree.held_by(rank), held


def test_layers_that_lie_alike_are_folded_and_bytes_are_those_of_the_shards() -> None:
    found = pool(2).run(_text)
    assert all(said == held for _, said, held in found)
    text = found[0][0]
    assert text == found[1][0] and max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][:3] == ["_Model:", "1,576", "parameters,"]
    assert ["0-3", "(x4)", "_Block", "2.125", "KiB", "4.125", "KiB"] in rows
    assert [row[:2] for row in rows if row[:1] == ["4"]] == [["4", "_Block"]]
    assert "S(1), used as B" in text and "tied to tok.weight" in text
    assert ["mask", "bool[3]", "B", "3", "B", "3", "B"] in rows


def test_all_layers_alike_are_one_line_with_their_list() -> None:
    text = consistent.visualize(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ).text()
    assert "0.0-1 (x2)" in text


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))


def _long_names(rank: int) -> str:
    layers = nn.ModuleDict({"post_attention_layernorm_of_it": _Norm(), "lm_head": nn.Linear(4, 2)})
    model = nn.ModuleDict({"decoder": layers, "a_module_with_a_longer_name": _Norm()})
    model = consistent.parallelize(model, consistent.placement("cpu", [0, 1]), "zero3")
    return consistent.visualize(model).text()


def test_a_module_with_one_tensor_is_one_line_whose_layout_is_whole() -> None:
    text = pool(2).run(_long_names)[0]
    lines = [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    ones = [line for line in lines if line and "f32[1000]" in line]
    assert len(ones) == 2 and all(line[2:6] == ["S(0),", "used", "as", "B"] for line in ones)
    assert ["lm_head", "Linear", "20", "B", "40", "B"] in lines  # of two: a line for each
    assert not [line for line in lines if "_Norm" in line]


def test_a_module_of_plain_tensors_says_so() -> None:
    text = consistent.visualize(nn.Linear(4, 2)).text()
    assert "plain tensors, whole on every rank" in text.splitlines()[0]
    assert text.splitlines()[-1] == "Every rank holds all of it: 40 B."


def test_a_module_without_tensors_and_one_that_is_not_initialised_are_drawn() -> None:
    assert "0 parameters" in consistent.visualize(nn.ReLU()).text()
    assert "not known yet" in consistent.visualize(nn.LazyLinear(3)).text()


def _stages(rank: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for k in range(2):
        consistent.parallelize(model[k], consistent.placement("cpu", [k]), {})
    return consistent.visualize(model).text()


def test_stages_on_other_ranks_stay_apart() -> None:
    text = pool(2).run(_stages)[0]
    assert "on 2 placements" in text and "on ranks 0" in text and "on ranks 1" in text
    assert "A rank holds at most 80 B of 160 B (50%)" in text
