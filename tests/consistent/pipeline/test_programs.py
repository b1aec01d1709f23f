"""What a pipeline records: a program for each shape, and for each set of trained parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consistent import B, Placement
from consistent.nn import pipeline
from consistent.pipeline import engine
from tests.ranks import on_ranks
from tests.twins import assert_same, randn

from .gpt import gradients
from .test_pipeline import one_each


class Net(nn.Module):
    """Four layers, and one in the last stage that batches of an odd number of rows do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.extra = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.extra(x) if x.shape[0] % 2 == 0 else x


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, 4, seed=rows), randn(rows, 4, seed=-rows)


@on_ranks(2)
def test_more_shapes_than_are_kept(rank: int) -> None:
    plain, kept = Net(), engine.MAX_PROGRAMS
    pipe = pipeline(Net(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2)
    engine.MAX_PROGRAMS = 2
    try:
        for rows in 3 * [1, 2, 3, 4, 6, 5]:
            x, y = batch(2 * rows)
            plain.zero_grad()
            pipe.model.zero_grad()
            pipe.step(x, y)
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(plain(a), b) / 2).backward()
            mine, wanted = gradients(pipe.model), gradients(plain)
            for name, grad in wanted.items():
                assert (mine[name] is None) == (grad is None), (rows, name)
                if grad is not None:
                    assert_same(mine[name], grad)
    finally:
        engine.MAX_PROGRAMS = kept


FREEZES = {
    "first stage": ["layers.0", "layers.1"],
    "last stage": ["layers.2", "layers.3", "extra"],
    "a part of each": ["layers.0", "layers.3"],
}


@on_ranks(2)
def test_parameters_that_are_frozen_between_steps(rank: int) -> None:
    for (_, names), schedule in zip(FREEZES.items(), ("1f1b", "gpipe", "1f1b"), strict=True):
        plain = Net()
        pipe = pipeline(
            Net(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2, schedule=schedule
        )
        twins = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (plain, pipe.model)]
        for step, frozen in enumerate([False, True, True, False]):
            for net, optimizer in twins:
                for name in names:
                    net.get_submodule(name).requires_grad_(not frozen)
                if step != 1:  # there frozen parameters have the gradients of the step before
                    optimizer.zero_grad()
            x, y = batch(4)
            F.mse_loss(plain(x), y).backward()
            assert_same(pipe.step(x, y), F.mse_loss(plain(x), y))
            norms = []
            for net, optimizer in twins:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
                optimizer.step()
            assert_same(norms[1], norms[0])
        assert_same(dict(pipe.model.named_parameters()), dict(plain.named_parameters()))


class Asks(Net):
    """Decides by whole numbers and truth values of its arguments between its parts."""

    def forward(self, x: Any, mask: Any = None, count: Any = None) -> Any:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 1 and not mask.all():
                x = x * mask[:, None]
            if k == 2:
                flipped = mask.clone().logical_not_()
                x = x * 2 if flipped.any() and int(count.max()) < 3 else x
                x = x + 0.1 * mask.nonzero().shape[0] + len(mask[mask].tolist())
        return x


def asked(step: int, masked: bool) -> tuple[torch.Tensor, ...]:
    mask = torch.tensor([True, True, True, not masked])
    return randn(4, 4, seed=step), mask, torch.tensor([[step % 2], [1], [2], [1]])


@on_ranks(2)
def test_values_of_masks_decide_for_each_micro_batch(rank: int) -> None:
    plain = Asks()
    pipe = pipeline(Asks(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2)
    for step, masked in enumerate([False, True, False, True, True]):
        (x, mask, count), y = asked(step, masked), randn(4, 4, seed=9)
        before = mask.clone()
        plain.zero_grad()
        pipe.model.zero_grad()
        wanted = 0.0
        for a in range(0, 4, 2):
            rows = slice(a, a + 2)
            loss = F.mse_loss(plain(x[rows], mask[rows], count[rows]), y[rows]) / 2
            loss.backward()
            wanted += loss.item()
        assert_same(pipe.step((x, mask, count), y), torch.tensor(wanted, dtype=torch.float64))
        mine, grads = gradients(pipe.model), gradients(plain)
        for name, grad in grads.items():
            if grad is not None:
                assert_same(mine[name], grad)
        assert torch.equal(mask, before)
    assert len(pipe._engine.programs) == 2


@on_ranks(2)
def test_ranks_whose_masks_decide_otherwise_all_raise(rank: int) -> None:
    pipe = pipeline(Asks(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2)
    with pytest.raises(
        RuntimeError, match="of micro-batch 1 decides what it does, and rank 0 finds"
    ):
        pipe.step(asked(0, masked=rank == 1), randn(4, 4, seed=9))
    pipe.step(asked(0, masked=True), randn(4, 4, seed=9))


def written_through_a_view(mask: Any) -> Any:
    flags = mask.clone()
    flags[1:3].fill_(False)
    return 5 if flags.sum() > 1 else 6


def written_itself(mask: Any) -> Any:
    mask[0] = False
    return 5 if mask.any() else 6


def its_data_set(mask: Any) -> Any:
    flags = mask.clone()
    flags.data = ~flags
    return 5 if flags.any() else 6


def written_as_out(mask: Any) -> Any:
    flags = torch.empty(4, dtype=torch.bool)
    torch.logical_not(mask, out=flags)
    return 5 if flags.any() else 6


def an_answer_sorted(mask: Any) -> Any:
    """Writes into the list and the array that it got."""
    flags, array = mask.tolist(), mask.numpy()
    first = 5 if flags[0] else 6
    flags.sort()
    array.sort()
    return first


READS: list[Any] = [
    written_through_a_view,
    written_itself,
    its_data_set,
    written_as_out,
    an_answer_sorted,
    lambda m: sum(k for k, x in enumerate(m) if x),
    lambda m: torch.arange(4)[m].sum(),
    lambda m: m.long().cumsum(0).tolist()[2],
    lambda m: 5 if False in m else 6,
    lambda m: 5 if torch.equal(m, torch.ones_like(m)) else 6,
    lambda m: m.unique().numel(),
    lambda m: torch.arange(4).repeat_interleave(m.long()).sum(),
    lambda m: torch.arange(4)[: m.sum()].sum(),
    lambda m: 5 if m.float().mean() > 0.6 else 6,
    lambda m: torch.nonzero(m, as_tuple=True)[0].shape[0],
    lambda m: 5 if repr(m).count("True") > 3 else 6,
    lambda m: len(f"{m} {m.all()}"),
]


class Reads(Net):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.layers[2](self.layers[1](x) * self.read(mask))


@on_ranks(2)
def test_each_way_to_read_a_mask_decides_for_each_batch(rank: int) -> None:
    x, y = batch(4)
    masks = [[True] * 4, [False, True, True, True], [True, True, True, False], [True] * 4]
    for read in READS:
        plain = Reads(read)
        pipe = pipeline(Reads(read), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=1)
        for mask in masks:
            wanted = F.mse_loss(plain(x, torch.tensor(mask)), y)
            assert_same(pipe.step((x, torch.tensor(mask)), y), wanted)


class Makes(nn.Module):
    """Returns a plain tensor beside a global one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x), torch.arange(4.0).double()


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Makes(), nn.Bilinear(4, 4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        y, bias = self.first(x)
        more = bias + 1
        return self.second(y + bias, (y * 0 + more).tanh()), more


@on_ranks(3)
def test_plain_tensors_that_a_module_of_a_stage_makes(rank: int) -> None:
    def loss(out: Any, y: Any) -> Any:
        return F.mse_loss(out[0], y) + out[1].mean()

    world = [Placement("cpu", [0, 1]), Placement("cpu", [2])]
    plain, pipe = Biased(), pipeline(Biased(), world, ["second"], loss=loss, micro_batches=2)
    for step in range(2):
        x, y = batch(6 + 2 * step)
        plain.zero_grad()
        pipe.model.zero_grad()
        wanted = loss(plain(x), y)
        wanted.backward()
        assert_same(pipe.step(x, y), wanted)
        assert_same(gradients(pipe.model), gradients(plain))


class Shifted(Net):
    """The sum of a layer's output and a number that is an attribute."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (3 if self.number is True else self.number)


@on_ranks(2)
def test_numbers_that_are_attributes_are_told_apart(rank: int) -> None:
    # Of these hash(-1) == hash(-2), and 1 == True.
    pipe = pipeline(Shifted(-1), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=1)
    x, y = batch(2)
    for number in (-1, -2, 1, True, 1.0):
        pipe.model.number = number
        loss = pipe.step(x, y)
        wanted = F.mse_loss(Shifted(number)(x), y)
        assert loss.to_global(Placement.all("cpu"), B).full().item() == pytest.approx(wanted.item())


def test_a_pipeline_without_placements_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="placements is empty"):
        pipeline(Net(), [], "auto")
