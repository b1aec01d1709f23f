"""What is measured counts as at the host's usual pace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consistent.auto.machines import host_speed, machine, replay, stopwatch, this_machine
from consistent.auto.machines.background_load import BackgroundLoad
from consistent.auto.machines.host_speed import HostSpeed
from consistent.auto.machines.measurement_cache import MeasurementCache
from consistent.auto.machines.this_machine import ThisMachine
from tests.consistent.auto.machines.test_this_machine import CALLS


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_what_a_slow_host_takes_counts_as_what_it_takes_usually(
    slower: float, tmp_path: Path, monkeypatch: Any
) -> None:
    this = machine("this")
    assert isinstance(this, ThisMachine)
    monkeypatch.setattr(host_speed, "fixed_seconds", lambda during: 0.01 * slower)
    monkeypatch.setattr(replay, "time_call", lambda call, cold: 2.0 * slower)
    here = replace(
        this, measurements=MeasurementCache(tmp_path / "kept.jsonl"), host_speed=HostSpeed(0.01)
    )
    assert here.op_seconds(CALLS["mm"]()) == pytest.approx(2.0)


def test_a_look_counts_for_a_moment(monkeypatch: Any) -> None:
    now, looks = [0.0], []
    monkeypatch.setattr(host_speed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(host_speed, "fixed_seconds", lambda during: looks.append(during) or 0.02)
    found = HostSpeed(0.01)
    assert not found.is_known and found.at_usual_speed(1.0) == 1.0
    found.measure()
    assert found.is_known and found.at_usual_speed(1.0) == 0.5
    now[0] += host_speed.VALID_S
    assert not found.is_known and len(looks) == 1


def test_fixed_calls_are_timed_as_ops_are(monkeypatch: Any) -> None:
    # Other programs had the processor for nine tenths of the time.
    monkeypatch.setattr(stopwatch, "time_calls", lambda run, count, alone: (0.001, 0.01))
    assert host_speed.fixed_seconds(0.1) == pytest.approx(0.001)


def test_fixed_calls_take_a_while(monkeypatch: Any) -> None:
    assert 1e-4 < host_speed.fixed_seconds(0.0) < 1.0
    monkeypatch.setattr(this_machine, "USUAL_S", 0.05)
    assert 1e-4 < this_machine._usual_seconds(BackgroundLoad(0)) < 1.0
