"""A small GPT in stages against the same training on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent import Placement
from consistent.nn import pipeline
from consistent.pipeline.schedules import SCHEDULES
from tests.ranks import on_ranks
from tests.twins import assert_same

from .gpt import GPT, batch, gradients, loss_of, trained

STEPS = 3


def one_each() -> list[Placement]:
    return [Placement("cpu", [r]) for r in range(torch.distributed.get_world_size())]


def train(pipe: Any, steps: int = STEPS, rows: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW(pipe.model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids, target = batch(step, rows)
        optimizer.zero_grad()
        loss = pipe.step(ids, target)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(pipe: Any, plain: GPT, rows: int = 8) -> None:
    wanted, grads = trained(plain, STEPS, rows)
    assert train(pipe, STEPS, rows) == pytest.approx(wanted, abs=1e-9)
    assert_same(gradients(pipe.model), grads, rtol=1e-6, atol=1e-9)
    named = {n: p for n, p in plain.named_parameters(remove_duplicate=False)}
    assert_same(dict(pipe.model.named_parameters(remove_duplicate=False)), named)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, 4)
def test_every_schedule_trains_as_one_process_does(rank: int, schedule: str) -> None:
    pipe = pipeline(GPT(8), one_each(), loss=loss_of, micro_batches=8, schedule=schedule)
    same(pipe, GPT(8))


@on_ranks(3)
def test_uneven_micro_batches_skips_and_tied_weights(rank: int) -> None:
    for options in ({"tied": True}, {"skips": True}, {"tied": True, "skips": True}):
        for schedule in ("1f1b", "zbvzerobubble"):
            pipe = pipeline(
                GPT(**options), one_each(), loss=loss_of, micro_batches=6, schedule=schedule
            )
            same(pipe, GPT(**options), rows=8)
