"""What a search finds: it fits, it runs, it is the same again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent.auto import Strategy
from consistent.auto.machines.known import KNOWN
from consistent.auto.simulation.alike import EqualStages
from consistent.auto.strategies.estimates import StrategyChoice
from consistent.auto.strategies.strategy import strategy_for
from consistent.nn.plan import Plan
from tests.consistent.auto.strategies import programs
from tests.ranks import pool

CPU = replace(KNOWN["h100-8"], device_type="cpu")


def _search(ranks: int, **given: Any) -> Any:
    model, x, y = programs.made()
    return consistent.search(model, ranks, x, loss=F.cross_entropy, target=y, machine=CPU, **given)


@cache
def found_on_two_ranks() -> Any:
    return _search(2)


def test_finds_the_same_again_says_what_it_tried_and_leaves_the_model_as_it_is() -> None:
    model, x, y = programs.made()
    before = {name: p.clone() for name, p in model.named_parameters()}
    first = found_on_two_ranks()
    second = consistent.search(model, 2, x, loss=F.cross_entropy, target=y, machine=CPU)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert first.best.__dict__ == second.best.__dict__
    assert [(t.choice, t.seconds) for t in first.tried] == [
        (t.choice, t.seconds) for t in second.tried
    ]
    assert first.best.ranks == 2 and first.count >= len(first.tried) > 10
    simulated = [t for t in first.tried if t.report is not None]
    assert [t.seconds for t in simulated] == sorted(t.seconds for t in simulated)
    assert str(first.best) in str(first)


CHOICES = {
    "stages and recomputation": StrategyChoice(2, 1, 1, "data", False, True, 2, 4),
    "zero2 with micro-batches": StrategyChoice(1, 1, 2, "zero2", False, False, 2, 2),
    "zero3": StrategyChoice(1, 1, 2, "zero3", False, True, 4, 1),
    "tensor": StrategyChoice(1, 2, 1, "data", False, False, 8, 1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_runs_from_its_file_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    choice, (model, _, _) = CHOICES[name], programs.made()
    split = ["blocks.2"] if choice.stages > 1 else []
    again = [f"blocks.{k}" for k in range(4)]
    made = strategy_for(model, choice, split, again, "cpu")
    path = made.save(tmp_path / "strategy.yaml")
    assert str(Strategy.load(path)) == str(made)
    wanted = programs.losses(None)
    for found in pool(2).run(programs.run, str(path)):
        assert found == pytest.approx(wanted, rel=1e-10)


def test_serves_other_numbers_of_ranks_along_dp() -> None:
    model, _, _ = programs.made()
    made = strategy_for(model, CHOICES["zero2 with micro-batches"], [], [], "cpu")
    assert made.on(3).data == 3
    with pytest.raises(ValueError, match="for 2 ranks .* there are 1"):
        made.on(1)


def test_a_file_with_stages_is_no_plan(tmp_path: Path) -> None:
    model, _, _ = programs.made()
    choice = CHOICES["stages and recomputation"]
    path = strategy_for(model, choice, ["blocks.2"], [], "cpu").save(tmp_path / "strategy.yaml")
    with pytest.raises(ValueError, match="Strategy.load"):
        Plan.load(path)
    plain = Plan({"*": "B"}).save(tmp_path / "plan.yaml")
    with pytest.raises(ValueError, match="plan and no strategy"):
        Strategy.load(plain)
    path.write_text(path.read_text().replace("stages: 2", "stages: two"))
    with pytest.raises(ValueError, match="stages is 'two'"):
        Strategy.load(path)


def test_says_how_many_ranks_would_do() -> None:
    with pytest.raises(ValueError, match=r"bytes a rank on 2 ranks[^$]*fits on \d+ ranks"):
        _search(2, memory=60_000)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "not a number of ranks"),
        ({"memory": -1}, "not a number of bytes"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _search(**{"ranks": 2, **given})


def test_stages_that_are_alike_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated() -> Any:
        with consistent.simulate(4, CPU) as sim:
            model, x, y = programs.made()
            places = [consistent.placement("cpu", [rank]) for rank in range(4)]
            split = ["blocks.1", "blocks.2", "blocks.3"]
            pipe = consistent.nn.pipeline(
                model, places, split, loss=F.cross_entropy, micro_batches=4
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(x, y)
                optimizer.step()
            met.append([p.grad is not None for p in model.parameters()])
        return sim.report()

    met: list[Any] = []
    ours = simulated()
    monkeypatch.setattr(EqualStages, "record_equal_by_events", lambda *given: None)
    wanted = simulated()
    assert met[0] == met[1]
    assert ours.seconds == pytest.approx(wanted.seconds, rel=1e-12)
    assert ours.bytes == wanted.bytes and ours.bytes_of == wanted.bytes_of
    assert {r: p.bytes for r, p in ours.peaks.items()} == {
        r: p.bytes for r, p in wanted.peaks.items()
    }
