"""The built-in figures of each device type."""

from __future__ import annotations

import pytest

from consistent.cost_model.built_in import BUILT_IN, uniform_cost_model


@pytest.mark.parametrize("device", sorted(BUILT_IN))
def test_local_copies_are_nearly_free_but_not_free(device):
    speeds = BUILT_IN[device]
    local, sent = speeds.move_seconds(0, 1 << 20), speeds.move_seconds(1 << 20, 1 << 20)
    assert 0 < local < sent / 2


@pytest.mark.parametrize("device", sorted(BUILT_IN))
def test_seconds_are_latency_and_bytes_over_bandwidth(device):
    speeds = BUILT_IN[device]
    assert speeds.latency + 1000 / speeds.bandwidth < speeds.move_seconds(1000, 0)
    assert 1000 / speeds.memory < 1000 / speeds.bandwidth


def test_the_short_figures_are_those_that_were_given():
    figures = {"latency": 3e-5, "bandwidth": 2e9, "overhead": 1e-6, "memory": 1e10, "python": 7e-5}
    made = uniform_cost_model("cpu", **figures, flops=5e10)
    for name, value in figures.items():
        assert getattr(made, name) == pytest.approx(value, rel=1e-12), name
    assert uniform_cost_model("cuda", **figures, flops=5e10).python == 0.0


def test_a_built_in_message_takes_as_long_between_any_ranks():
    for costs in BUILT_IN.values():
        for name in ("all_gather", "all_reduce", "all_to_all", "exchange"):
            for ranks in ((0, 1), tuple(range(0, 4096, 8))):
                seconds = costs.message_seconds(name, 1000, ranks)
                assert seconds == costs.latency + 1000 / costs.bandwidth
                moved = costs.move_seconds(1000, 500, name, ranks)
                assert moved == costs.move_seconds(1000, 500)
