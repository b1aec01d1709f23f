"""What messages between hosts cost is measured once, kept by each host, and one figure for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mirrored.comm import Link
from mirrored.transports.default import current
from mirrored.transports.in_process import run_ranks
from mirrored.transports.tuning import between, table
from mirrored.transports.tuning.other_work import Usage
from mirrored.transports.tuning.table import MESSAGES, Table

ONE = Table(latency_s=7e-6, bytes_per_s=3e9)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(between, "usage", lambda: Usage(0.0, None, 0.0))  # nobody disturbs


def met() -> list[Link]:
    """What the ranks of two hosts take their messages to cost."""
    return run_ranks(lambda r: between.load_or_measure(current(), (0, 1), f"{r} of uid 0"), 2)


def test_it_is_measured_once_for_these_hosts() -> None:
    first = met()
    kept = table.load_stored(2, MESSAGES)
    assert kept is not None and first == [kept.link] * 2
    table.save(replace(kept, latency_s=7e-6), 2, MESSAGES)
    assert [link.latency_s for link in met()] == [7e-6] * 2


def test_other_hosts_measure_anew() -> None:
    table.save(replace(ONE, hosts="others"), 2, MESSAGES)
    assert met()[0] != ONE.link
    kept = table.load_stored(2, MESSAGES)
    assert kept is not None and kept.hosts != "others"


def test_a_table_for_any_hosts_is_taken() -> None:
    table.save(ONE, 2, MESSAGES)
    assert met() == [ONE.link] * 2


def test_what_other_programs_disturbed_is_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(between, "others_disturb", lambda host, processes: True)
    one, other = met()
    assert one == other and table.load_stored(2, MESSAGES) is None


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {0: (1e-6, 2e9, 3e-6, 4e9), 1: (2e-6, 1e9, 4e-6, 3e9)}
    monkeypatch.setattr(between, "measure_costs", lambda way, *rest: figures[way.rank])
    link = met()[0]
    assert (link.latency_s, link.bytes_per_s) == (2e-6, 1e9)
    assert (link.copy_start_s, link.copy_bytes_per_s) == (4e-6, 3e9)
