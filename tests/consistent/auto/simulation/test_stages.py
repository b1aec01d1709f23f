"""Simulated stages beside the same ones on ranks: bytes, memory and the ops of each rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent.auto.machines import Machine
from consistent.auto.machines.known import KNOWN
from consistent.auto.simulation.log import Mark, Message, ScheduleEvent, SimulatedOp
from tests.consistent.auto.simulation.programs import (
    Stages,
    begin_stages,
    last_step,
    measured,
    measured_stages,
    muon,
    runs,
    simulated,
)
from tests.ranks import pool

_LOW, _FUSED = torch.bfloat16, partial(torch.optim.AdamW, fused=True)
STAGES = {
    "1f1b": Stages(),
    "three stages, float32 copies": Stages(3, dtype=_LOW),
    "fused, float32 copies": Stages(dtype=_LOW, optimizer=_FUSED),
    "gpipe, momentum, clipped": Stages(
        schedule="gpipe",
        dtype=_LOW,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        clips=True,
    ),
    "data": Stages(ranks=2, plan="data", dtype=_LOW),
    "zero1": Stages(ranks=2, plan="zero1", dtype=_LOW),
    "zero2": Stages(ranks=2, plan="zero2", dtype=_LOW),
    "zero3": Stages(ranks=2, plan="zero3", dtype=_LOW),
    "tensor, fused": Stages(ranks=2, plan="tensor", optimizer=_FUSED),
    "frozen, foreach": Stages(varies="frozen", optimizer=partial(torch.optim.AdamW, foreach=True)),
    "buffers, adafactor": Stages(varies="buffers", optimizer=torch.optim.Adafactor),
    "tied, gradients stay": Stages(varies="tied", to_none=False),
}


UPDATED = [
    "1f1b", "three stages, float32 copies", "fused, float32 copies",
    "tensor, fused", "zero1",
]  # fmt: skip


class Both(NamedTuple):
    """What ranks did, and what was simulated of it: on each rank, or on one rank of each stage."""

    real: list[Any]
    peaks: dict[int, Any]
    bytes_of: dict[int, int]
    updates: dict[int, Counter[str]]  # of those in UPDATED


@cache
def both(name: str) -> Both:
    made, updates = STAGES[name], name in UPDATED
    ranks = made.stages * made.ranks
    real = pool(ranks).run(measured_stages, made, updates)
    sim = simulated(ranks, real[0][2], 1, begin_stages, made)
    report, ops = sim.report(), {}
    if updates:
        events = last_step(sim)
        (begin,) = (i for i, e in enumerate(events) if isinstance(e, ScheduleEvent))
        for rank in range(0, ranks, made.ranks):
            mine = (e for e in events[begin:] if runs(e) and e.rank == rank)
            ops[rank] = Counter(e.work.op for e in mine)
    return Both(real, report.peaks, report.bytes_of, ops)


@pytest.mark.parametrize("name", STAGES)
def test_stages_send_what_they_send_and_hold_what_they_hold(name: str) -> None:
    made, found = STAGES[name], both(name)
    # One rank of each stage.
    assert sorted(found.peaks) == list(range(0, made.stages * made.ranks, made.ranks))
    for rank, peak in found.peaks.items():
        calls, held, *_ = found.real[rank]
        told = [call.bytes for call in calls if call.name == "gather_objects"]
        # What ranks tell each other is a number in pickle, which is longer in later tests.
        assert found.bytes_of[rank] == pytest.approx(sum(c.bytes for c in calls), abs=8 * len(told))
        assert peak.bytes == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("name", UPDATED)
def test_each_rank_runs_the_optimizer_of_its_stage(name: str) -> None:
    found = both(name)
    assert sorted(found.updates) == sorted(found.peaks)
    for rank, ops in found.updates.items():
        assert ops and ops == found.real[rank][3]


@pytest.mark.parametrize("name", ["fused, float32 copies", "zero1"])
def test_kinds_of_memory_are_told_apart_on_each_rank(name: str) -> None:
    for peak in both(name).peaks.values():
        # Of each number in bfloat16, Adam has a copy and two moments in float32.
        assert peak.kinds["optimizer"] == 6 * peak.kinds["parameters"] / STAGES[name].ranks
        assert peak.kinds["gradients"] == pytest.approx(peak.kinds["parameters"], abs=8)


def test_frozen_weights_and_buffers_are_parameters_of_their_rank() -> None:
    plain, *others = (
        both(name).peaks for name in ("1f1b", "frozen, foreach", "buffers, adafactor")
    )
    for rank in range(2):
        sizes = [peaks[rank].kinds["parameters"] for peaks in others]
        block = 12 * 256 * 256 * 4
        assert block < sizes[0] < plain[rank].kinds["parameters"]  # without what is small and real
        assert sizes[1] == plain[rank].kinds["parameters"] + 1000 * 256 * 4


def test_matrices_that_one_rank_steps_whole_are_sent_to_it() -> None:
    made = Stages(ranks=2, optimizer=muon)
    real = pool(4).run(measured, begin_stages, made)
    sim = simulated(4, real[0][2], 1, begin_stages, made)
    for rank in (0, 2):
        sent = [e for e in last_step(sim) if isinstance(e, Message) and e.rank == rank]
        exchanged = [call.bytes for call in real[rank][0] if call.name == "exchange"]
        assert [e.bytes for e in sent if e.name == "exchange" and e.bytes] == exchanged


class Follows(Machine):
    """A CPU whose ranks take long to follow what others do."""

    def follow_seconds(self, work: Any) -> float:
        return 1000.0


def test_ranks_follow_the_optimizer_of_other_stages() -> None:
    h100 = KNOWN["h100-8"]
    given = {f.name: getattr(h100, f.name) for f in fields(h100)}
    machine = Follows(**given | {"device_type": "cpu", "host_seconds": 0.0})
    with consistent.simulate(ranks=2, machine=machine) as sim:
        step = begin_stages(Stages())
        for _ in range(2):
            step()
    ends = [i for i, e in enumerate(sim.events) if isinstance(e, Mark) and e.what == "step"]
    ops = [e for e in sim.events[ends[0] : ends[1]] if isinstance(e, SimulatedOp) and e.placement]
    for rank, track in sim.report().timeline.tracks.items():
        others = sum(e.placement.coordinate_of(rank) is None for e in ops)
        assert track.compute // 1000 == others > 0


def test_a_stage_sends_its_gradient_before_it_waits_for_sums_over_ranks() -> None:
    with consistent.simulate(ranks=4, machine="a100-8") as sim:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        places = [consistent.placement("cuda", ranks) for ranks in ([0, 1], [2, 3])]
        pipe = consistent.nn.pipeline(model, places, loss=F.mse_loss, micro_batches=2)
        pipe.step(torch.randn(8, 8), torch.randn(8, 8))
    (run,) = (e.run for e in sim.events if isinstance(e, ScheduleEvent))
    last = [e for e in run.action_events["B", 1, True].events if isinstance(e, Message)]
    said = ["wait" if e.wait else e.name for e in last]
    assert said.index("send") < said.index("wait")


def test_kinds_of_stages_that_are_told_change_nothing() -> None:
    def made(kinds: tuple[str, ...]) -> Any:
        with consistent.simulate(ranks=8, machine="a100-8") as sim:
            sim.stage_kinds = kinds
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
            places = [consistent.placement("cuda", [2 * k, 2 * k + 1]) for k in range(4)]
            pipe = consistent.nn.pipeline(model, places, loss=F.mse_loss, micro_batches=4)
            optimizer = torch.optim.AdamW(model.parameters())
            pipe.step(torch.randn(16, 8), torch.randn(16, 8))
            optimizer.step()
        return sim.report()

    found, told = made(()), made(("first", "middle", "middle", "last"))
    assert told.seconds == found.seconds
    assert told.peaks == found.peaks
    assert told.sent == found.sent
