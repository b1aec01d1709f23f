"""A small GPT in stages against the same training on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent import Placement
from consistent.auto.simulation.real_memory import MemoryRecorder
from consistent.nn import pipeline
from consistent.pipeline.schedules import SCHEDULES
from tests.ranks import ALL, on_ranks
from tests.twins import assert_same

from .gpt import GPT, LENGTH, WIDTH, batch, gradients, loss_of, trained

STEPS = 2


def one_each() -> list[Placement]:
    return [Placement("cpu", [r]) for r in range(torch.distributed.get_world_size())]


def train(pipe: Any, steps: int, kind: Any = torch.optim.AdamW) -> list[float]:
    optimizer = kind(pipe.model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids, target = batch(step)
        optimizer.zero_grad()
        loss = pipe.step(ids, target)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(pipe: Any, plain: GPT, steps: int = STEPS, kind: Any = torch.optim.AdamW) -> None:
    wanted, grads = trained(plain, steps, kind=kind)
    assert train(pipe, steps, kind) == pytest.approx(wanted, abs=1e-9)
    assert_same(gradients(pipe.model), grads, rtol=1e-6, atol=1e-9)
    named = {n: p for n, p in plain.named_parameters(remove_duplicate=False)}
    assert_same(dict(pipe.model.named_parameters(remove_duplicate=False)), named)


# A schedule is a table, proven in test_schedules.py: what a second step and AdamW need, one of them
# shows. For ranks outside a stage, AdamW takes a fourth of a step.
def training_of(schedule: str) -> tuple[int, Any]:
    return (STEPS, torch.optim.AdamW) if ALL or schedule == "1f1b" else (1, torch.optim.SGD)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(*([2, 3, 4] if ALL else [3]))
def test_every_schedule_trains_as_one_process_does(rank: int, schedule: str) -> None:
    net = GPT(4, tied=True)
    pipe = pipeline(net, one_each(), loss=loss_of, micro_batches=8, schedule=schedule)
    same(pipe, GPT(4, tied=True), *training_of(schedule))


@on_ranks(3)
def test_uneven_micro_batches_skips_and_tied_weights(rank: int) -> None:
    given = [("1f1b", ["tied"]), ("1f1b", ["skips"]), ("zbvzerobubble", ["tied", "skips"])]
    for schedule, names in given:
        options: Any = dict.fromkeys(names, True)
        pipe = pipeline(
            GPT(**options), one_each(), loss=loss_of, micro_batches=6, schedule=schedule
        )
        same(pipe, GPT(**options), *training_of(schedule))


PLANS: dict[str, Any] = {
    "data and tensor": ["data", "tensor"],
    "zero": ["zero3", "zero2"],
    "tensor and zero": ["tensor", "zero1"],
}


# Each plan under the first schedule, and one of them where the backward is split.
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (schedule, name)
        for schedule in ("1f1b", "zbvzerobubble")
        for name in PLANS
        if ALL or schedule == "1f1b" or name == "tensor and zero"
    ],
)
@on_ranks(4)
def test_stages_over_two_ranks_each(rank: int, name: str, schedule: str) -> None:
    places = [Placement("cpu", [0, 1]), Placement("cpu", [2, 3])]
    plan = PLANS[name] * (2 if schedule == "zbvzerobubble" else 1)
    pipe = pipeline(
        GPT(tied=True), places, loss=loss_of, micro_batches=4, schedule=schedule, plan=plan
    )
    same(pipe, GPT(tied=True), *training_of(schedule))


@on_ranks(2, 3)
def test_cut_by_names_and_what_lies_where(rank: int) -> None:
    world = one_each()
    names = ["blocks.2", "norm"][: len(world) - 1]
    pipe = pipeline(GPT(4), world, names, loss=loss_of, micro_batches=4)
    assert pipe.parts(0) == ["words", "places", "blocks.0", "blocks.1"]
    assert pipe.parts(1)[0] == "blocks.2"
    where: Any = dict(pipe.model.named_parameters())
    assert where["blocks.1.q.weight"].placement == world[0]
    assert where["head.weight"].placement == world[-1]
    same(pipe, GPT(4))


@on_ranks(2)
def test_a_rank_does_not_hold_the_activations_that_it_has_sent(rank: int) -> None:
    held, rows = [], 32
    for count in (4, 16):
        pipe = pipeline(GPT(), one_each(), loss=loss_of, micro_batches=count, schedule="1f1b")
        with MemoryRecorder() as holding:
            for _ in range(2):
                holding.reset_peak()
                pipe.step(*batch(0, rows * count))
        held.append(holding.peak)
    # Twelve micro-batches more: the peak has their tokens, and half of an activation each at most.
    assert held[1] - held[0] < 12 * rows * LENGTH * WIDTH * 8 / 2


@on_ranks(2)
def test_outputs_and_forward_alone(rank: int) -> None:
    plain = GPT()
    ids, target = batch(0, 7)
    pipe = pipeline(GPT(), one_each(), loss=loss_of, micro_batches=3, schedule="interleaved1f1b")
    assert_same(pipe(ids), plain(ids))
    assert all(p.grad is None for p in pipe.model.parameters())
    loss, logits = pipe.step(ids, target, outputs=True)
    assert_same(logits, plain(ids))
    assert_same(loss, loss_of(plain(ids), target))
    assert_same(pipe(ids[:2]), plain(ids[:2]))


def dropped(net: Any, ids: Any, target: Any, count: int) -> float:
    """One step with dropout, micro-batch after micro-batch."""
    total = 0.0
    for a, b in zip(ids.chunk(count), target.chunk(count), strict=True):
        loss = loss_of(net(a), b) / count
        loss.backward()
        total += loss.item()
    return total


@on_ranks(2)
def test_dropout_draws_what_one_micro_batch_after_the_other_does(rank: int) -> None:
    import consistent

    ids, target = batch(0)
    eager = consistent.parallelize(GPT(dropout=0.3), Placement.all("cpu"))
    torch.manual_seed(3)
    wanted = [dropped(eager, ids, target, 4) for _ in range(2)]
    for schedule in ("gpipe", "dualpipev"):
        pipe = pipeline(
            GPT(dropout=0.3), one_each(), loss=loss_of, micro_batches=4, schedule=schedule
        )
        torch.manual_seed(3)
        assert [pipe.step(ids, target).item() for _ in range(2)] == pytest.approx(wanted)
        assert_same(gradients(pipe.model), gradients(eager))


@on_ranks(2)
def test_loss_that_is_a_sum(rank: int) -> None:
    plain, sums = GPT(), torch.nn.CrossEntropyLoss(reduction="sum")

    def loss(logits: Any, target: Any) -> Any:
        return sums(logits.flatten(0, 1), target.flatten())

    ids, target = batch(0, 7)
    wanted = loss(plain(ids), target)
    wanted.backward()
    pipe = pipeline(GPT(), one_each(), loss=loss, micro_batches=3, reduction="sum")
    assert_same(pipe.step(ids, target), wanted)
    assert_same(gradients(pipe.model), gradients(plain))


@on_ranks(2)
def test_clipping_and_accumulating(rank: int) -> None:
    plain = GPT(tied=True)
    pipe = pipeline(GPT(tied=True), one_each(), loss=loss_of, micro_batches=2)
    for step in range(2):  # gradients add up
        ids, target = batch(step)
        pipe.step(ids, target)
        loss_of(plain(ids), target).backward()
    assert_same(gradients(pipe.model), gradients(plain))


@on_ranks(2)
def test_auto_measures_a_sample(rank: int) -> None:
    pipe = pipeline(GPT(6), one_each(), loss=loss_of, micro_batches=2, sample=batch(0)[0])
    assert 1 <= sum(name.startswith("blocks") for name in pipe.parts(0)) <= 5
    same(pipe, GPT(6))


@on_ranks(2)
def test_auto_says_on_every_rank_that_the_model_does_not_take_the_sample(rank: int) -> None:
    with pytest.raises(RuntimeError, match="rank 0 measures the model on the sample"):
        pipeline(GPT(), one_each(), loss=loss_of, micro_batches=2, sample="no batch")


class Masked(GPT):
    """Writes into plain tensors, and decides by what follows from sizes, between its parts."""

    def forward(self, ids: Any) -> Any:
        places = torch.arange(ids.shape[1], device=ids.device)
        keep = torch.ones(ids.shape[1], dtype=torch.float64)
        part = keep[1:]
        part[2] = 0.5
        part.mul_(2)
        x = self.words(ids) * keep[:, None] + self.places(places)
        if (torch.diff(places) == 1).all():
            x = x + 1
        for block in self.blocks:
            x = block(x) * keep[:, None]
        return self.head(self.norm(x))


@on_ranks(2)
def test_what_a_forward_does_to_plain_tensors_between_its_parts(rank: int) -> None:
    same(pipeline(Masked(), one_each(), loss=loss_of, micro_batches=3), Masked())


class Writes(GPT):
    def forward(self, ids: Any) -> Any:
        x = first = self.words(ids)
        for block in self.blocks:
            x = block(x)
        first.add_(x)
        return self.head(self.norm(first))


@on_ranks(2)
def test_writing_into_what_an_earlier_stage_made_is_an_error(rank: int) -> None:
    pipe = pipeline(Writes(), one_each(), loss=loss_of, micro_batches=2)
    with pytest.raises(RuntimeError, match="add_ at .* writes into a tensor of stage 0 what stage"):
        pipe.step(*batch(0))
