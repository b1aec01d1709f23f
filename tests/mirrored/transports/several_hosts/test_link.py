"""Plans count what messages between hosts cost, once all ranks have met."""

from __future__ import annotations

import pytest

from consistent.cost_model.built_in import BUILT_IN
from consistent.movement.speeds import device_speeds
from mirrored.transports.default import current
from mirrored.transports.tuning import table
from mirrored.transports.tuning.table import MESSAGES, Table
from tests.mirrored.transports.several_hosts.kinds import on_hosts


def priced(rank: int, ranks: int) -> list[tuple[float, float]]:
    before = device_speeds("cpu")
    current().shares(tuple(range(ranks)), "cpu")
    return [(found.latency, found.bandwidth) for found in (before, device_speeds("cpu"))]


@pytest.mark.parametrize("hosts", ["pq", "ppq"])  # which nobody else has let meet
def test_it_is_counted_once_all_ranks_have_met(hosts: str) -> None:
    before = table.load_stored(len(hosts), MESSAGES)
    assert before is not None  # conftest.py keeps one
    table.save(Table(latency_s=5e-5, bytes_per_s=2e9), len(hosts), MESSAGES)
    try:
        found = on_hosts(hosts, priced, len(hosts))
    finally:
        table.save(before, len(hosts), MESSAGES)
    cpu = BUILT_IN["cpu"]
    assert all(rank[0] in ((cpu.latency, cpu.bandwidth), (4e-6, 4e9)) for rank in found)
    assert all(rank[1] == (5e-5, 2e9) for rank in found)
