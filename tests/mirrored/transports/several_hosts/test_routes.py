"""Every way in which ranks may lie on hosts: sums are in order, and cost no more than messages."""

from __future__ import annotations

from itertools import product

import pytest

from mirrored.transports.several_hosts.hosts import partner, positions_by_host
from mirrored.transports.several_hosts.routes import SumStep, plan_sum


def layouts(n: int) -> list[tuple[int, ...]]:
    """Hosts are numbered as they come."""
    found = product(range(n), repeat=n)
    return [of for of in found if list(dict.fromkeys(of)) == list(range(max(of) + 1))]


def between(of: tuple[int, ...], target: int, wide: int, stages: tuple[SumStep, ...]) -> int:
    """Bytes between hosts, in addends."""
    sent = sum(of[k] != of[stage.worker] for stage in stages for k in stage.adds)
    for before, stage in zip(stages, stages[1:]):
        sent += wide * (of[before.worker] != of[stage.worker])
    return sent + (of[stages[-1].worker] != of[target])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("wide", [1, 2])
def test_sums_are_in_order_and_never_cost_more_than_messages(wide: int, at_once: bool) -> None:
    for of in (of for n in (2, 3, 4, 5) for of in layouts(n)):
        for target in range(len(of)):
            stages = plan_sum(of, target, wide, at_once)
            assert [k for stage in stages for k in stage.adds] == list(range(len(of)))
            alone = sum(host != of[target] for host in of)
            assert between(of, target, wide, stages) <= alone
            if at_once:  # whoever comes first waits for nothing, and the last one is the target
                *before, last = stages
                assert len(before) <= 1 and last.worker == target
                assert all(of[k] == of[s.worker] for s in before for k in s.adds)


@pytest.mark.parametrize(
    "of, target, wide, stages",
    [
        ((0, 0, 1, 1), 2, 1, [(0, (0, 1)), (2, (2, 3))]),
        ((0, 0, 1, 1), 3, 1, [(1, (0, 1)), (3, (2, 3))]),
        ((0, 0, 1, 1), 0, 1, [(0, (0, 1, 2, 3))]),  # two addends are no more than there and back
        ((0, 0, 1, 1, 1), 0, 1, [(0, (0, 1)), (2, (2, 3, 4))]),
        ((0, 0, 1, 1), 2, 2, [(2, (0, 1, 2, 3))]),  # a sum is as long as two addends
        ((0, 0, 1, 1, 2, 2), 4, 1, [(0, (0, 1)), (2, (2, 3)), (4, (4, 5))]),
        ((0, 1, 0, 1), 1, 1, [(1, (0, 1, 2, 3))]),
    ],
)
def test_the_route_of_a_part(
    of: tuple[int, ...], target: int, wide: int, stages: list[tuple[int, tuple[int, ...]]]
) -> None:
    assert plan_sum(of, target, wide, False) == tuple(SumStep(*stage) for stage in stages)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_ranks_of_a_host_share_what_comes_from_another(n: int) -> None:
    for of in layouts(n):
        for host, own in enumerate(positions_by_host(of)):
            for other in set(of) - {host}:
                loads = [partner(of, k, other) for k in own]
                counts = [loads.count(k) for k in positions_by_host(of)[other]]
                assert max(counts) - min(counts) <= 1
