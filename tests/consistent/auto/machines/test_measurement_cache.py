"""Numbers that were kept: of this user alone, and never waited for without end."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from consistent.auto.machines import measurement_cache
from consistent.auto.machines.measurement_cache import MeasurementCache


def test_a_lock_that_is_held_for_ever_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_cache, "_LOCK_TIMEOUT_S", 0.2)
    lock = tmp_path / "kept.jsonl.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert MeasurementCache(tmp_path / "kept.jsonl").get("a", lambda: 1.0) == 1.0
        assert 0.2 <= time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["kept.jsonl", "kept.jsonl.lock"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_in_the_way_is_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / name
    victim.write_text("precious")
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    numbers = MeasurementCache(tmp_path / "kept.jsonl")
    assert numbers.get("a", lambda: 1.0) == 1.0 and numbers.get("a", lambda: 2.0) == 1.0
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "line", ['["a", "x"]', '["a", [1]]', '["a", NaN]', '["a", true]', "[" * 50_000, '{"a": 1}',
             '[3, 1.0]', '[["a"], 1.0]', "9" * 5000, "\x00"],
)  # fmt: skip
def test_a_line_that_is_no_number_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(f"{line}\n" + '["b", 2.0]\n')
    numbers = MeasurementCache(path)
    assert numbers.get("a", lambda: 1.0) == 1.0 and numbers.get("b", lambda: 3.0) == 2.0
