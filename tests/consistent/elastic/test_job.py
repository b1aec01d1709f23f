"""What ranks keep of a step, and what others get of it, without processes that die."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import time
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent.elastic import Job
from consistent.elastic.member import Member
from consistent.elastic.recovery import Recovery
from consistent.elastic.slow import SlowRankDetector
from mirrored.every_rank import gather_from_ranks
from tests.consistent.pipeline.gpt import GPT, batch, loss_of
from tests.ranks import on_ranks

PLAN = {"dp": "data", "fsdp": "zero3"}


def begun(*, every: int = 1, peers: bool = False) -> Job:
    """A job of all ranks, which no launcher has started."""
    job = Job(every, peers)
    job.begin(None, lambda: False)
    return job


def training(placement, plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.BatchNorm1d(7), nn.Linear(7, 3))
    consistent.parallelize(model.double(), placement, plan, verbose=False)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer, placement, sbp=(0, "B")) -> float:
    x = torch.arange(60, dtype=torch.float64).reshape(12, 5).sin()
    optimizer.zero_grad()
    loss = model(consistent.distribute(x, placement, sbp)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@on_ranks(4)
def test_a_step_that_was_given_up_is_done_again_with_the_same_loss(rank):
    job = begun()
    placement = job.placement({"dp": -1, "fsdp": 2})
    model, optimizer = training(placement, PLAN)
    job.keep(model=model, optimizer=optimizer)
    for _ in range(3):
        step(model, optimizer, placement)
        job.commit(note=[job.step])
    wanted = [step(model, optimizer, placement) for _ in range(2)]  # not committed
    other = consistent.placement("cpu", [[3], [2], [1], [0]], axes=("dp", "fsdp"))
    for again in (placement, other):
        job.begin(None, lambda: False)
        model, optimizer = training(again, PLAN)
        assert job.keep(model=model, optimizer=optimizer) == {"note": [2]}
        assert job.step == 3
        found = [step(model, optimizer, again) for _ in range(2)]
        assert found == pytest.approx(wanted, abs=1e-12)


@on_ranks(4)
def test_a_rank_that_keeps_nothing_gets_its_shards_and_nothing_else(rank):
    job = begun()
    placement = job.placement({"dp": -1, "fsdp": 2})
    model, optimizer = training(placement, PLAN)
    job.keep(model=model, optimizer=optimizer)
    step(model, optimizer, placement)
    job.commit()
    wanted = step(model, optimizer, placement)
    kept = job._copies.last_copy
    assert kept is not None
    size = sum(x.nbytes for _, x in kept.pieces.values())
    if rank == 1:
        job = Job(1, False)
    job.begin(None, lambda: False)
    model, optimizer = training(placement, PLAN)
    job.keep(model=model, optimizer=optimizer)
    assert job.received == (size if rank == 1 else 0)
    assert step(model, optimizer, placement) == pytest.approx(wanted, abs=1e-12)


@on_ranks(3)
def test_peers_keep_what_lies_once(rank):
    job = begun(peers=True)
    placement = job.placement()
    model, optimizer = training_on_one_axis(placement)
    job.keep(model=model, optimizer=optimizer)
    kept = job._copies.last_copy
    assert kept is not None
    shards = sum(x.nbytes for piece, x in kept.pieces.values() if piece.box is not None)
    assert (
        kept.nbytes()[1] == gather_from_ranks(shards)[rank - 1]
    )  # one more shard, and nothing else
    wanted = {name: x.full() for name, x in model.state_dict().items()}
    if rank == 2:
        job = Job(1, True)
    job.begin(None, lambda: False)
    model, optimizer = training_on_one_axis(placement)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    job.keep(model=model, optimizer=optimizer)
    for name, x in model.state_dict().items():
        assert torch.equal(x.full(), wanted[name])


def training_on_one_axis(placement):
    torch.manual_seed(0)
    model = nn.Linear(5, 7).double()
    consistent.parallelize(model, placement, "zero3", verbose=False)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@on_ranks(3)
def test_what_lies_once_is_refused_with_three_remedies(rank):
    job = begun()
    model, optimizer = training_on_one_axis(job.placement())
    with pytest.raises(
        ValueError, match="model.bias, model.weight would be lost with one rank"
    ) as e:
        job.keep(model=model, optimizer=optimizer)
    for remedy in ('plan={"dp": "data", "fsdp": "zero3"}', "peers=True", "job.keep(folder=...)"):
        assert remedy in str(e.value)


@on_ranks(3)
def test_the_ranks_that_kept_something_are_lost_together(rank):
    job = begun(peers=True)
    placement = job.placement()
    model, optimizer = training_on_one_axis(placement)
    job.keep(model=model, optimizer=optimizer)
    if rank > 0:
        job = Job(1, True)
    job.begin(None, lambda: False)
    model, optimizer = training_on_one_axis(placement)
    with pytest.raises(
        RuntimeError, match="the ranks that kept model.bias, model.weight are lost together"
    ):
        job.keep(model=model, optimizer=optimizer)


@on_ranks(3)
def test_what_one_rank_has_taken_all_take(rank):
    job = begun()
    placement = job.placement()
    model = nn.Linear(3, 3).double()
    consistent.parallelize(model, placement, "data", verbose=False)
    job.keep(model=model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    copies = job._copies
    copies.prepare((1, 0), {"model": model})
    if rank == 1:
        copies.commit()  # the others were broken off before
    job.begin(None, lambda: False)
    job.keep(model=model)
    assert job.step == 1 and torch.equal(model.weight.full(), torch.full((3, 3), 7.0).double())


@on_ranks(3)
def test_what_no_rank_has_taken_none_takes(rank):
    job = begun()
    placement = job.placement()
    model = nn.Linear(3, 3).double()
    consistent.parallelize(model, placement, "data", verbose=False)
    before = model.weight.full()
    job.keep(model=model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    job._copies.prepare((1, 0), {"model": model})
    job.begin(None, lambda: False)
    job.keep(model=model)
    assert job.step == 0 and torch.equal(model.weight.full(), before)


@pytest.mark.parametrize(
    ("size", "copies", "shape"),
    [
        (4, 2, (2, 2)),
        (3, 2, (3, 1)),
        (2, 2, (2, 1)),
        (2, 1, (1, 2)),
        (1, 2, (1, 1)),
        (6, 2, (3, 2)),
    ],
)
def test_the_placement_of_the_ranks_that_there_are(size, copies, shape):
    job = Job(1, False)
    job.size = size
    assert job.placement({"dp": -1, "fsdp": 2}, copies=copies).shape == shape


def test_axes_without_one_that_takes_what_is_left():
    with pytest.raises(ValueError, match="has 0 axes of -1 ranks"):
        Job(1, False).placement({"dp": 2, "fsdp": 2})


class Told(SlowRankDetector):
    """Of ranks that say how long they worked."""

    def __init__(self, steps: int) -> None:
        super().__init__(3.0, steps)
        self._counts, self._names = [0] * 3, ["p0", "p1", "p2"]

    def hears(self, *seconds: float) -> dict[int, str]:
        return self.find_slow_ranks([struct.pack("<d", each) for each in seconds])


def test_a_rank_is_slow_if_it_is_so_in_each_of_some_steps():
    ranks = Told(2)
    assert ranks.hears(1.0, 4.0, 1.0) == {}
    assert ranks.hears(1.0, 2.9, 1.0) == {}
    assert ranks.hears(1.0, 4.0, 1.0) == {}
    found = ranks.hears(1.0, 3.5, 1.0)
    assert list(found) == [1] and "rank 1 (p1) works 3.5 times as long" in found[1]
    assert ranks.hears(1.0, 3.5, 1.0) == {}  # it was named


@on_ranks(3)
def test_a_slow_rank_is_named_with_its_host_though_all_wait_for_it(rank):
    job = Job(1, False, slow=SlowRankDetector(3.0, 3))
    job.begin(None, lambda: False)
    placement = job.placement()
    model = nn.Linear(5, 7).double()
    consistent.parallelize(model, placement, "data", verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.keep(model=model)
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        for _ in range(4):
            time.sleep(0.2 if rank == 1 else 0.001)
            step(model, optimizer, placement, (0,))
            job.commit()
    said = heard.getvalue()
    assert ("rank 1 (process" in said and f"of {socket.gethostname()}" in said) == (rank == 0)
    assert "rank 2" not in said


@on_ranks(3)
def test_a_lost_stage_of_a_pipeline_is_filled_from_its_copy(rank):
    def build(ranks: list[int]) -> tuple[Any, torch.optim.Optimizer]:
        net = GPT(6, dropout=0.1)
        stages = [consistent.Placement("cpu", [r]) for r in ranks]
        pipe = consistent.nn.pipeline(net, stages, ["blocks.2", "blocks.4"][: len(ranks) - 1],
                                      loss=loss_of, micro_batches=2)  # fmt: skip
        return pipe, torch.optim.AdamW(pipe.model.parameters(), lr=0.01)

    def step(pipe: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        optimizer.zero_grad()
        loss = pipe.step(*batch(number))
        optimizer.step()
        return gather_from_ranks(None if loss is None else float(loss))[0] or 0.0

    job = begun(peers=True)
    pipe, optimizer = build([0, 1, 2])
    job.keep(model=pipe.model, optimizer=optimizer)
    for k in range(2):
        step(pipe, optimizer, k)
        job.commit()
    wanted = [step(pipe, optimizer, k) for k in (2, 3)]
    state = {k: x.full() for k, x in pipe.model.state_dict().items()}
    if rank == 1:  # it was lost, with the second stage, and another process came
        job = Job(1, True)
    for ranks in ([0, 1, 2], [2, 0, 1]):
        job.begin(None, lambda: False)
        pipe, optimizer = build(ranks)
        job.keep(model=pipe.model, optimizer=optimizer)
        assert job.step == 2
        found = [step(pipe, optimizer, k) for k in (2, 3)]
        assert found == pytest.approx(wanted, abs=1e-12)
        for name, x in pipe.model.state_dict().items():
            torch.testing.assert_close(x.full(), state[name])


class TooLate:
    """A member whose launcher says that the program is over."""

    def next_world(self, timeout_s: float, recovery: Recovery) -> None:
        return None

    def close(self) -> None:
        pass


def test_a_process_that_comes_after_the_end_ends_without_an_error(monkeypatch, capsys):
    monkeypatch.setattr(Member, "of_this_process", staticmethod(TooLate))
    with pytest.raises(SystemExit) as ended:
        consistent.elastic.run(lambda job: pytest.fail("it has no ranks"))
    assert ended.value.code == 0
    assert "was over on the other ranks before this one came" in capsys.readouterr().err
