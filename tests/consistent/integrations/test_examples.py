"""Every library's example on two ranks: the losses of one process, and files that go on."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import TensorDataset

import consistent
from consistent import Placement
from consistent.integrations.transformers import Trainer
from tests.ranks import on_ranks
from tests.scripts import module_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> Any:
    """The example as a module."""
    return module_of(EXAMPLES / f"{name}.py")


@on_ranks(2, timeout=240)
def test_trainer_trains_evaluates_saves_resumes_and_loads_the_best(
    rank: int, tmp_path: Path
) -> None:
    assert example("hf_trainer").difference(tmp_path) < 1e-5  # the Trainer adds up losses in f32
    files = {each.name for each in (tmp_path / "all" / "checkpoint-8").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files


@on_ranks(2, timeout=240)
def test_trainer_whose_ranks_read_their_parts(rank: int, tmp_path: Path) -> None:
    it, read = example("hf_trainer"), []

    class Watched(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    texts = it.texts
    it.texts = lambda count, seed: Watched(*texts(count, seed).tensors)
    spread = {"placement": Placement.all("cpu"), "plan": "zero3", "whole": False}
    found = it.train(Trainer, tmp_path / "parts", **spread)
    parts = len(read)
    resumed = it.train(Trainer, tmp_path / "parts", True, **spread)
    if rank == 0:
        read.clear()
        alone = it.train(transformers.Trainer, tmp_path / "alone")
        assert parts <= len(read) * 0.7  # 3 of 5 items, of the last batches 2 of 3 and 1 of 2
        assert found == pytest.approx(alone, abs=1e-5)
        assert resumed == pytest.approx(alone, abs=1e-5)


def with_own(kind: Any) -> Any:
    def make(model: Any, **options: Any) -> Any:
        own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return kind(model=model, optimizers=(own, None), **options)

    return make


@cache
def alone_with_own() -> list[float]:
    """The losses of one process, for all plans."""
    with tempfile.TemporaryDirectory() as folder:
        return example("hf_trainer").train(with_own(transformers.Trainer), Path(folder))


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor"])
def test_trainer_whose_optimizer_was_made_before_it(rank: int, plan: str, tmp_path: Path) -> None:
    it, spread = example("hf_trainer"), {"placement": Placement.all("cpu"), "plan": plan}
    found = it.train(with_own(Trainer), tmp_path, **spread)
    resumed = it.train(with_own(Trainer), tmp_path, True, **spread)
    if rank == 0:
        assert found == pytest.approx(alone_with_own(), abs=1e-5)
        assert resumed == pytest.approx(alone_with_own(), abs=1e-5)


@on_ranks(2, timeout=240)
def test_accelerate_has_the_losses_of_one_process(rank: int, tmp_path: Path) -> None:
    assert example("accelerate_loop").difference(tmp_path) < 1e-12


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("plan", ["data", "zero3", "tensor"])
def test_peft_has_the_losses_of_one_process(rank: int, plan: str) -> None:
    assert example("peft_lora").difference(plan) < 1e-5  # the loss is computed in f32


@on_ranks(2, timeout=240)
def test_lightning_has_the_losses_of_one_process(rank: int, tmp_path: Path) -> None:
    assert example("lightning_fit").difference(tmp_path) < 1e-12
    assert dist.get_world_size() == 2


@on_ranks(2, 3)
def test_an_optimizer_whose_state_is_plain_and_sent_to_a_gradient(rank: int) -> None:
    """transformers' Adafactor: ``torch.zeros(rows).to(grad)``."""
    losses = []
    for plan in (None, "data", "zero2", "zero3"):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4).double()
        if plan is not None:
            consistent.parallelize(model, Placement.all("cpu"), plan)
        optimizer = transformers.Adafactor(model.parameters())
        found = []
        for _ in range(4):
            loss = model(torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert all(each == pytest.approx(losses[0], rel=1e-9) for each in losses)
