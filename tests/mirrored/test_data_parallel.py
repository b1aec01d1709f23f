"""Copies of a model on every rank train as one model on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
import mirrored
from tests.ranks import RankError, pool

STEPS = 5


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=numbers, dtype=torch.double), torch.randint(
        3, (12,), generator=numbers
    )


def curve(rank: int, copies: bool) -> tuple[list[float], int]:
    model = mirrored.DataParallel(build()) if copies else build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        if copies:
            n = mirrored.current().size
            x, y = (mirrored.scatter(list(t.chunk(n))) for t in (x, y))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(sum(part.item() for part in loss.to_list()) / n if copies else loss.item())
    buckets = len(model._get_ddp_logging_data()["bucket_sizes"].split(",")) if copies else 0
    return found, buckets


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_one_process_on_the_whole_batch(ranks: int) -> None:
    expected, _ = curve(0, False)
    for found, buckets in pool(ranks).run(curve, True):
        assert found == pytest.approx(expected, abs=1e-12)
        assert buckets == 1  # torch's reducer had the gradients


def global_parameters(rank: int) -> None:
    mirrored.DataParallel(consistent.parallelize(build(), consistent.placement.all("cpu")))


def test_global_parameters_are_refused_on_every_rank() -> None:
    with pytest.raises(TypeError, match="parameter .0.weight. is a GlobalTensor") as caught:
        pool(2).run(global_parameters)
    assert isinstance(caught.value.__cause__, RankError)


def test_without_a_process_group_it_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        mirrored.DataParallel(build())
