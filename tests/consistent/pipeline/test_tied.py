"""A parameter that several stages use is one parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import consistent
from consistent import Placement
from consistent.nn import pipeline
from tests.ranks import on_ranks
from tests.twins import assert_same

from .gpt import GPT, batch, gradients, loss_of


def one_each() -> list[Placement]:
    return [Placement("cpu", [r]) for r in range(torch.distributed.get_world_size())]


def cut(model: nn.Module, **options: Any) -> Any:
    return pipeline(model, one_each(), loss=loss_of, micro_batches=2, **options)


def list_of_gradients(model: nn.Module) -> Any:
    return [p.grad for p in model.parameters()]


def both() -> tuple[GPT, Any]:
    """The plain model and the one in stages, after one step's backward."""
    plain, pipe = GPT(tied=True), cut(GPT(tied=True))
    loss_of(plain(batch(0)[0]), batch(0)[1]).backward()
    pipe.step(*batch(0))
    return plain, pipe


@on_ranks(2, 3)
def test_it_is_named_counted_and_clipped_once(rank: int) -> None:
    plain, pipe = both()
    model = pipe.model
    assert model.head.weight is model.words.weight
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    norms: Any = [nn.utils.get_total_norm(list_of_gradients(m)) for m in (model, plain)]
    assert_same(norms[0], norms[1])
    vectors = [sum((p**2).sum().item() for p in m.parameters()) for m in (model, plain)]
    assert vectors[0] == pytest.approx(vectors[1], rel=1e-12)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, plain)]
    assert_same(norms[0], norms[1])
    assert_same(gradients(model), gradients(plain))
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_an_optimizer_from_before_steps_it_once_with_groups_by_name(rank: int) -> None:
    def trained_by(model: GPT, step: Any, cut_after: Any) -> Any:
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        step = cut_after(model) or step
        for k in range(3):
            optimizer.zero_grad()
            step(k)
            optimizer.step()
        assert len(optimizer.state) == len(list(model.parameters()))
        return dict(model.named_parameters(remove_duplicate=False))

    plain, ours = GPT(tied=True), GPT(tied=True)

    def in_stages(model: GPT) -> Any:
        pipe = cut(model)
        return lambda k: pipe.step(*batch(k))

    wanted = trained_by(
        plain, lambda k: loss_of(plain(batch(k)[0]), batch(k)[1]).backward(), lambda _: None
    )
    assert_same(trained_by(ours, None, in_stages), wanted)


@on_ranks(2)
def test_its_stages_compute_with_the_same_bits(rank: int) -> None:
    _, pipe = both()
    seen: list[Any] = []
    head = pipe.model.head
    head.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    with torch.no_grad():
        pipe.model.words.weight.data.mul_(1.5)
    pipe(batch(0)[0])
    held = pipe.model.words.weight.full()
    assert pipe.model.head.weight is pipe.model.words.weight
    if rank == 1:
        ran = seen[-2:]  # once before that while the program is recorded
        assert [x.placement for x in ran] == [Placement("cpu", [1])] * 2
        assert all(torch.equal(x.to_local(), held) for x in ran)


@on_ranks(2)
def test_hooks_see_the_gradients_of_all_stages(rank: int) -> None:
    found = []
    for make in (lambda: GPT(tied=True), lambda: cut(GPT(tied=True))):
        pipe: Any = make()
        model = getattr(pipe, "model", pipe)
        count: list[Any] = []
        model.words.weight.register_hook(lambda g: g * 2)
        model.head.weight.register_post_accumulate_grad_hook(count.append)
        for k in range(2):  # gradients add up
            if pipe is model:
                loss_of(pipe(batch(k)[0]), batch(k)[1]).backward()
            else:
                pipe.step(*batch(k))
        assert count and all(p is model.words.weight for p in count)
        found.append(gradients(model))
    assert_same(found[1], found[0])


@on_ranks(2)
def test_it_is_frozen_and_thawed_for_all_stages(rank: int) -> None:
    plain, pipe = both()
    for value in (False, True):
        for model in (plain, pipe.model):
            model.zero_grad()
            model.head.weight.requires_grad_(value)
        loss_of(plain(batch(1)[0]), batch(1)[1]).backward()
        pipe.step(*batch(1))
        assert_same(gradients(pipe.model), gradients(plain))


@on_ranks(2)
def test_other_dtypes_and_averages(rank: int) -> None:
    plain, pipe = both()
    averages = [AveragedModel(m) for m in (plain, pipe.model)]
    for m, average in zip((plain, pipe.model), averages, strict=True):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        average.update_parameters(m)
    assert len(list(averages[1].parameters())) == len(list(averages[0].parameters()))
    assert_same(dict(averages[1].named_parameters()), dict(averages[0].named_parameters()))
    plain.float().zero_grad()
    pipe.model.float().zero_grad()
    wanted = loss_of(plain(batch(1)[0]), batch(1)[1])
    assert_same(pipe.step(*batch(1)), wanted, rtol=1e-5, atol=1e-6)
    assert pipe.model.head.weight.grad.dtype is torch.float32


@on_ranks(2)
def test_a_scaler_unscales_it_once(rank: int) -> None:
    found = []
    for kind in ("plain", "stages"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))  # it makes its tensors at its first use
        model: Any = GPT(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaled = lambda y, t, s=scaler: s.scale(loss_of(y, t))  # noqa: E731
        pipe = pipeline(model, one_each(), loss=scaled, micro_batches=2) if kind == "stages" else 0
        for k in range(2):
            optimizer.zero_grad()
            x, y = batch(k)
            pipe.step(x, y) if pipe else scaled(model(x), y).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(dict(model.named_parameters(remove_duplicate=False)))
    assert_same(found[1], found[0])


@on_ranks(2)
def test_it_is_saved_and_loaded_once(rank: int, tmp_path: Path) -> None:
    jobs = []
    for lr in (0.01, 0.5):
        pipe = cut(GPT(tied=True))
        optimizer = torch.optim.AdamW(pipe.model.parameters(), lr=lr)
        pipe.step(*batch(0))
        optimizer.step()
        jobs.append((pipe, {"model": pipe.model, "optimizer": optimizer}))
    folder = consistent.checkpoint.save(str(tmp_path), **jobs[0][1]) or str(tmp_path)
    consistent.checkpoint.load(str(folder), **jobs[1][1])
    assert jobs[1][0].model.head.weight is jobs[1][0].model.words.weight
    whole = jobs[0][0].model.state_dict()
    assert_same(dict(jobs[1][0].model.state_dict()), {k: v.full() for k, v in whole.items()})
    plain = GPT(tied=True)
    plain.load_state_dict({k: v.full() for k, v in whole.items()})
    assert_same(jobs[1][0].step(*batch(1)), loss_of(plain(batch(1)[0]), batch(1)[1]))


@on_ranks(2)
def test_a_parameter_put_in_its_place_is_an_error(rank: int) -> None:
    _, pipe = both()
    pipe.model.head.weight = nn.Parameter(torch.zeros(17, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="'weight' of Linear is another parameter than the one"):
        pipe.step(*batch(0))
