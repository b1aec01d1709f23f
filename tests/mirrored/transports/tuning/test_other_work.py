from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mirrored.transports.tuning import other_work
from mirrored.transports.tuning.other_work import Usage, others_disturb, usage


@pytest.mark.parametrize(
    ("host", "processes", "disturbed"),
    [
        (2.1, [1.0, 1.0], False),  # all of it was the ranks' own work
        (2.1, [0.4, 0.4], True),
        (None, [1.0, 1.0], False),  # a system that does not tell
    ],
)
def test_work_beside_the_ranks_disturbs(
    host: float | None, processes: list[float], disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert others_disturb(Usage(1.0, host, 0.0), processes) == disturbed


def test_processors_that_ranks_leave_idle_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert not others_disturb(Usage(1.0, 7.0, 0.0), [1.0, 1.0])
    assert others_disturb(Usage(1.0, 8.5, 0.0), [1.0, 1.0])


def test_usage_counts_the_work_of_this_process() -> None:
    before = usage()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    spent = usage() - before
    assert spent.process >= 0.2 and spent.clock >= 0.19
    assert spent.host is None or spent.host >= 0.1  # counted in hundredths of a second


def test_usage_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_work, "_STAT", tmp_path / "none")
    assert usage().host is None and (usage() - usage()).host is None
