"""Searches of layouts inside a simulation go by the simulated machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consistent
from consistent import B, placement
from consistent.auto.machines.known import KNOWN
from consistent.cost_model.built_in import BUILT_IN
from consistent.cost_model.model import CostModel
from consistent.layout_problem.costs import axis_ranks, boxing_seconds_on, start_seconds
from consistent.movement.speeds import costs_of_plans, device_speeds
from consistent.nn.plan import Plan
from consistent.nn.planners.layout_search import best_plan
from consistent.nn.planners.layout_search.follow import follow
from consistent.nn.planners.layout_search.record import record
from consistent.spec import P, TensorSpec
from tests.consistent.nn.planners.test_layout_search import GPT, MLP, predict, regress

HOSTS = [list(range(8)), list(range(8, 16))]


def test_searches_go_by_the_simulated_machine_and_messages_by_its_link_alone():
    a100 = KNOWN["a100-8"]
    with consistent.simulate(ranks=16, machine=a100):
        assert costs_of_plans("cuda") is a100
        assert costs_of_plans("cpu") == device_speeds("cpu")  # it has no such devices
        speeds = device_speeds("cuda")
        assert (speeds.latency, speeds.bandwidth) == (a100.latency, a100.bandwidth)
        assert speeds.peak_flops == BUILT_IN["cuda"].peak_flops
    assert costs_of_plans("cpu") == device_speeds("cpu") == BUILT_IN["cpu"]


def test_a_simulation_that_fails_leaves_no_machine_behind():
    with pytest.raises(KeyError), consistent.simulate(ranks=4, machine="a100-8"):
        raise KeyError
    assert costs_of_plans("cpu") == BUILT_IN["cpu"]


def test_a_message_takes_the_link_of_the_ranks_along_its_axis():
    a100 = KNOWN["a100-8"]
    with consistent.simulate(ranks=16, machine=a100):
        grid = placement("cuda", HOSTS)
    assert axis_ranks(grid, 0) == (0, 8) and axis_ranks(grid, 1) == tuple(range(8))
    spec = TensorSpec.of(grid, (P, P), (1 << 12, 1 << 12), torch.bfloat16)
    for axis, ranks in ((0, (0, 8)), (1, tuple(range(8)))):
        sbp = (B, P) if axis == 0 else (P, B)
        sent = 2 * (len(ranks) - 1) * spec.nbytes // len(ranks)
        expected = a100.message_seconds("all_reduce", sent, ranks)
        expected += a100.launch_seconds + spec.nbytes / a100.memory
        assert boxing_seconds_on(a100, spec, spec.with_sbp(sbp)) == pytest.approx(expected)
        start = a100.message_seconds("all_reduce", 0, ranks)
        assert start_seconds(a100, spec, spec.with_sbp(sbp)) == pytest.approx(start)


def simulated(machine: CostModel | None, a100=KNOWN["a100-8"]) -> tuple[float, Plan]:
    """(seconds of a simulated step, plan), if the plan is found for ``machine``."""
    with consistent.simulate(ranks=16, machine=a100) as sim:
        grid = placement("cuda", HOSTS)
        with torch.device("meta"):
            model = MLP(8192, 32768).to(torch.bfloat16)
        x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
        plan = best_plan(regress, grid, (model, x, x), machine=machine)
        consistent.parallelize(model, grid, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = consistent.zeros(8192, 8192, dtype=x.dtype, placement=grid, sbp=[B, B])
        for _ in range(2):
            regress(model, batch, batch)
            optimizer.step()
            optimizer.zero_grad()
    return sim.report().seconds, plan


def test_a_plan_for_the_simulated_machine_sends_less_between_hosts():
    # 8.6 ms instead of 13.4: by the built-in figures all links are equally fast.
    own, others = simulated(None), simulated(BUILT_IN["cuda"])
    assert own[0] < 0.8 * others[0]


def test_unequal_links_do_not_stop_the_search_of_two_axes_early():
    a100, grid = KNOWN["a100-8"], placement("cpu", HOSTS)
    with torch.device("meta"):
        model = GPT(2, 512, 8, 5000)
        tokens = torch.zeros(32, 128, dtype=torch.long)
    program = record(predict, model, grid, (model, tokens, tokens), {})
    equal = replace(a100, between=a100.inside)
    plans = [best_plan(predict, grid, (model, tokens, tokens), machine=m) for m in (a100, equal)]
    assert "begun" in plans[0].notes[0] and "begun" not in plans[1].notes[0]
    seconds = [follow(program, a100, plan).seconds for plan in plans]
    assert seconds[0] <= seconds[1]
