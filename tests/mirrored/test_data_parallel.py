"""Copies of a model on every rank train as one model on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
import mirrored
from tests.launch import launch
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


# The threads of a group are still at work when the copies, the last that know it, go: which of them
# has the interpreter first differs from round to round.
GOING = """
import copy, sys, torch, torch.distributed as dist, mirrored
for _ in range(8):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = mirrored.DataParallel(torch.nn.Linear(3, 1))
    model = copy.deepcopy(model) if sys.argv[1] == "copied" else model
    group, sums = dist.group.WORLD, [torch.ones(3) for _ in range(20)]
    dist.destroy_process_group()
    sys.setswitchinterval(100)  # seconds: a thread that has the interpreter keeps it
    for x in sums:
        group.allreduce([x])
    del group
    del model
    sys.setswitchinterval(0.005)
print("over")
"""


@pytest.mark.parametrize("made", ["new", "copied"])
def test_copies_that_outlive_their_process_group_go(made: str, tmp_path: Path) -> None:
    program = tmp_path / "going.py"
    program.write_text(GOING)
    done = launch(program, made, ranks=1, timeout=60)
    assert (done.status, done.printed) == (0, ["over\n"]), done.errors
