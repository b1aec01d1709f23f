"""Layers are split as a pair where one feeds the other, and not where only their widths fit."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from consistent.nn.planners.roles import find_linear_layers, find_pairs


def found(module: nn.Module) -> list[tuple[list[str], list[str]]]:
    made = find_pairs(module, find_linear_layers(module), 2)
    return [([x.name for x in p.columns], [x.name for x in p.rows]) for p in made]


def chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def parts(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


def test_layers_inside_an_actor_and_a_critic_are_no_pair() -> None:
    assert found(parts(actor=chain(8, 64, 64, 4), critic=chain(8, 64, 64, 1))) == []


def test_the_end_of_one_part_feeds_the_beginning_of_the_next() -> None:
    assert found(parts(up=chain(8, 32), down=chain(32, 8))) == [(["up.0"], ["down.0"])]
    assert found(parts(first=chain(4, 8, 32), last=chain(32, 8, 2))) == [(["first.1"], ["last.0"])]


def test_a_gate_is_a_part_of_its_own_or_beside_the_other_columns() -> None:
    gates = parts(gate=nn.Linear(8, 32), up=nn.Linear(8, 32))
    assert found(parts(gates=gates, down=nn.Linear(32, 8))) == [
        (["gates.gate", "gates.up"], ["down"])
    ]
    apart = parts(gate=chain(8, 32), up=chain(8, 32), down=chain(32, 8))
    assert found(apart) == [(["gate.0", "up.0"], ["down.0"])]
