"""Simulated programs beside the same ones on ranks: bytes, memory; and what a simulation leaves."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, P, S
from consistent.auto.machines.known import KNOWN
from consistent.auto.simulation.log import Message, SimulatedOp
from consistent.auto.simulation.timeline import Track
from mirrored.transports.default import current
from tests.consistent.auto.simulation import programs
from tests.consistent.auto.simulation.programs import last_step, runs, simulated
from tests.mirrored.kinds import over_gloo
from tests.ranks import pool

PLANS = {
    "data-2": (2, "data", (2,)),
    "zero1-2": (2, "zero1", (2,)),
    "zero3-3": (3, "zero3", (3,)),
    "tensor-2": (2, "tensor", (2,)),
    "zero3-tensor-4": (4, {"dp": "zero3", "tp": "tensor"}, (2, 2)),
}


def _sent_in_last_step(sim: Any) -> list[tuple[str, int, bool, int]]:
    """(name, bytes, whether it is waited for at once, how many tensors) of what the first rank
    sent."""
    sent = [e for e in last_step(sim) if isinstance(e, Message) and not e.wait]
    return [(e.name, e.bytes, not e.start, e.tensors) for e in sent if e.name != "gather_objects"]


@pytest.mark.parametrize("where", ["one host", "hosts"])
@pytest.mark.parametrize("name", PLANS)
def test_messages_are_exact_and_memory_is_within_a_tenth(name: str, where: str) -> None:
    ranks, plan, shape = PLANS[name]
    given = (programs.measured, programs.begin, ranks, plan, shape)
    apart = where == "hosts"
    calls, held, link = pool(ranks).run(*((over_gloo,) if apart else ()), *given)[0]
    sim = simulated(ranks, link, ranks if apart else 1, programs.begin, ranks, plan, shape)
    made, sent = sim.report(), sum(call.bytes for call in calls)
    assert sum(made.bytes.values()) == made.bytes["between" if apart else "inside"] == sent
    assert made.peak_bytes == pytest.approx(held, rel=0.1)
    found = [call for call in calls if call.name != "gather_objects"]
    sent_in_one = [(call.name, call.bytes, call.waits, call.tensors) for call in found]
    assert _sent_in_last_step(sim) == sent_in_one


@pytest.mark.parametrize("name", ["data-2", "zero1-2", "zero3-3"])
def test_ops_and_their_callers_are_those_of_ranks(name: str) -> None:
    ranks, plan, shape = PLANS[name]
    real = pool(ranks).run(programs.called, programs.begin, ranks, plan, shape)[0]
    made = Counter[tuple[str, str]]()
    for event in last_step(simulated(ranks, None, 1, programs.begin, ranks, plan, shape)):
        if runs(event):
            made[event.caller, event.work.op] += 1
    # The loss counts its targets, whole numbers that a simulation knows.
    counting = dict.fromkeys(("aten._to_copy.default", "aten.sum.default"), 1)
    assert made + Counter({("update", op): n for op, n in counting.items()}) == real


@pytest.mark.parametrize(("ranks", "more"), [(2, 0.0), (4, 0.75)])
def test_a_sum_by_messages_holds_what_arrives(ranks: int, more: float) -> None:
    # Of two ranks the total is made in what arrives; of four, three send a quarter each.
    peaks, numbers = [], 1 << 22
    for ranks_per_host in (ranks, 1):
        machine = replace(KNOWN["h100-8"], device_type="cpu", ranks_per_host=ranks_per_host)
        with consistent.simulate(ranks=ranks, machine=machine) as sim:
            placement = consistent.placement("cpu", range(ranks))
            x = consistent.zeros(numbers, placement=placement, sbp=P)
            x.to_global(sbp=B)
        peaks.append(sim.report().peak_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(more * 4 * numbers, abs=64)


def test_whole_numbers_have_the_values_that_recorders_follow() -> None:
    ids = (torch.arange(1 << 15) % 7 + 1).reshape(64, 512)
    with consistent.simulate(ranks=2, machine="h100-8") as sim:
        assert (ids != 0).all() and int(ids.max()) == 7
        assert len((ids == 7).nonzero()) == int((ids == 7).sum()) == 4681
        model = consistent.parallelize(nn.Embedding(8, 4), consistent.placement("cuda", [0, 1]))
        model(ids)
    assert any(isinstance(event, SimulatedOp) for event in sim.events)  # and their time is counted
    assert "read and taken for 0" not in str(sim.report())


def test_what_is_simulated_takes_no_memory_and_no_values() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with consistent.simulate(ranks=4096, machine="a100-8") as sim:
        placement = consistent.placement("cuda", range(4096))
        model = nn.Sequential(*(nn.Linear(40_000, 40_000) for _ in range(3)))  # 19 GB
        consistent.parallelize(model, placement, "zero3", verbose=False)
        optimizer = torch.optim.AdamW(model.parameters())
        x = consistent.distribute(torch.randn(8192, 40_000), placement, S(0))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        assert loss.item() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "KiB"
    made = sim.report()
    assert made.peaks[0].kinds["boxing"] >= 4 * 40_000**2  # gathered for use
    assert any("_local_scalar_dense" in line for line in made.read)


def test_a_simulation_leaves_nothing_behind() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    transport = current()
    with consistent.simulate(ranks=8, machine="a100-8"):
        placement = consistent.placement("cuda", range(8))
        consistent.randn(4, 4, placement=placement, sbp=B)
        torch.randn(1000, 1000)
    assert current() is transport
    assert torch.equal(torch.rand(3), wanted)
    with pytest.raises(RuntimeError, match="sees no GPU"):
        consistent.placement("cuda", range(8))
    assert torch.ones(300, 300).sum() == 90_000


def test_small_real_values_stay_real() -> None:
    with consistent.simulate(ranks=2, machine="a100-8"):
        places = torch.arange(10)
        assert places.sum().item() == 45
        assert (places > 3).nonzero().numel() == 6


@pytest.mark.parametrize("ask", ["item", "tolist", "nonzero", "mask"])
def test_sizes_that_depend_on_values_ask_for_a_bound(ask: str) -> None:
    asks = {
        "item": lambda x: x.argmax().item(),
        "tolist": lambda x: x.long().tolist(),
        "nonzero": lambda x: (x > 0).nonzero(),
        "mask": lambda x: x[x > 0],
    }
    with (
        consistent.simulate(ranks=2, machine="a100-8"),
        pytest.raises(RuntimeError, match=r"simulate\(\.\.\., bound=0\.5\)"),
    ):
        asks[ask](torch.randn(200, 200))


def test_a_bound_says_how_much_is_kept() -> None:
    with consistent.simulate(ranks=2, machine="a100-8", bound=0.25):
        x = torch.randn(200, 200)
        assert (x > 0).nonzero().shape == (10_000, 2)
        assert x[x > 0].shape == (10_000,)
        assert x[:, x[0].sum(0, keepdim=True).expand(200) > 0].shape == (200, 50)
        assert torch.masked_select(x, x > 0).shape == (10_000,)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 0}, "ranks=0 is not a number of ranks"),
        ({"ranks": 2, "rank": 2}, "rank=2 is none of the 2 ranks"),
        ({"ranks": 2, "bound": 0}, "bound=0 is not a share"),
        ({"ranks": 2, "machine": "a100-9"}, "a100-8"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(ValueError, match=said),
        consistent.simulate(**{"machine": "a100-8", **given}),
    ):
        pass


def test_simulations_do_not_lie_in_one_another() -> None:
    with (
        consistent.simulate(ranks=2, machine="a100-8"),
        pytest.raises(RuntimeError, match="goes on already"),
        consistent.simulate(ranks=2, machine="a100-8"),
    ):
        pass


def _inside_a_group(rank: int) -> str:
    with pytest.raises(RuntimeError) as raised, consistent.simulate(ranks=4, machine="a100-8"):
        pass
    return str(raised.value)


def test_a_process_group_is_refused() -> None:
    assert all("process group of 2 ranks" in said for said in pool(2).run(_inside_a_group))


def test_one_rank_is_followed_alone() -> None:
    with consistent.simulate(ranks=3, machine="a100-8", rank=2) as sim:
        placement = consistent.placement("cuda", range(3))
        x = consistent.distribute(torch.randn(1000, 200), placement, S(0))
        w = nn.Parameter(consistent.distribute(torch.randn(200, 200), placement, B))
        F.relu(x @ w).sum().backward()
        assert x.to_local().shape == (333, 200)
    assert set(sim.report().peaks) == {2}


@pytest.mark.parametrize("rows", [4, 1 << 22])  # the latter in memory that is only reserved
@pytest.mark.parametrize(("src", "dst"), [(P, B), (P, S(0)), (S(0), B), (S(0), S(1)), (B, S(1))])
def test_what_was_boxed_is_written_in_place(src: Any, dst: Any, rows: int) -> None:
    with consistent.simulate(ranks=2, machine="h100-8") as sim:
        p = consistent.placement("cuda", [0, 1])
        x = consistent.ones(rows, 2, placement=p, sbp=src, requires_grad=True)
        y = (x * 2).to_global(sbp=dst)
        y += 1
        y.sum().backward()
        assert x.grad.shape == x.shape
    assert sim.report().seconds > 0


def test_nothing_ran() -> None:
    with consistent.simulate(ranks=2, machine="a100-8") as sim:
        pass
    with pytest.raises(RuntimeError, match="nothing ran"):
        sim.report()


def test_messages_inside_a_host_go_beside_those_between_hosts() -> None:
    track, machine = Track(0), KNOWN["a100-8"]
    track.message(Message(0, "all_reduce", 10**9, (0, 8), "", start=1), machine)
    track.message(Message(0, "all_reduce", 1000, (0, 1), ""), machine)
    inside = machine.message_seconds("all_reduce", 1000, (0, 1))
    assert track.now == pytest.approx(inside)
    track.message(Message(0, "all_reduce", 1000, (0, 9), ""), machine)
    assert track.now > machine.message_seconds("all_reduce", 10**9, (0, 8))


def test_groups_whose_sizes_are_values_are_taken_for_equal() -> None:
    with consistent.simulate(ranks=4, machine="a100-8") as sim:
        placement = consistent.placement("cuda", range(4))
        x = consistent.distribute(torch.randn(1200, 16).bfloat16(), placement, B)
        w = consistent.distribute(torch.randn(12, 16, 16).bfloat16(), placement, S(0))
        ends = torch.randn(2000, 12).argmax(0).int()
        assert F.grouped_mm(x, w, offs=ends).shape == (1200, 16)
    (product,) = (e.work for e in sim.events if isinstance(e, SimulatedOp) and e.work.flops)
    assert product.flops == 2 * 300 * 16 * 16


def test_items_that_are_sorted_over_ranks_are_spread_evenly() -> None:
    with consistent.simulate(ranks=4, machine="a100-8") as sim:
        placement = consistent.placement("cuda", range(4))
        x = consistent.distribute(torch.randn(1 << 16), placement, S(0))
        assert x.sort().values.to_local().shape == (1 << 14,)
    swaps = [e for e in sim.events if isinstance(e, Message) and e.name == "all_to_all"]
    assert [e.bytes for e in swaps[:1]] == [3 * 4 * (1 << 12)]
