"""What a message costs is what the first rank that asks has measured: all ranks say the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consistent.cost_model.built_in import BUILT_IN
from consistent.movement.speeds import device_speeds, speeds_of
from mirrored.comm import Link
from mirrored.transports.default import current
from mirrored.transports.in_process import run_ranks
from mirrored.transports.tuning import table
from mirrored.transports.tuning.link import agreed_link, stored_link
from mirrored.transports.tuning.table import Table
from tests.ranks import pool


class World:
    """Ranks that agree at once: the first that asks says it for all."""

    def __init__(self) -> None:
        self.known = {}

    def agreed(self, name, make):
        return self.known.setdefault(name, make())


def measured(latency_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    table.save(replace(Table(), latency_s=latency_s), 2, "one")


def test_the_first_rank_says_it_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    measured(7e-6, tmp_path, monkeypatch)
    first = agreed_link(world, "cpu", lambda: stored_link(2, "one", True))
    measured(9e-6, tmp_path, monkeypatch)
    assert (
        first
        == agreed_link(world, "cpu", lambda: stored_link(2, "one", True))
        == Link(7e-6, Table().bytes_per_s)
    )


@pytest.mark.parametrize("size, shared, local", [(2, False, "2"), (2, True, "1"), (1, True, "1")])
def test_messages_of_other_hosts_were_not_measured(
    size: int, shared: bool, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert agreed_link(World(), "cpu", lambda: stored_link(size, "one", shared)) is None


def priced(rank: int) -> tuple:
    found = device_speeds("cpu")
    link = current().link("cpu")
    assert link is not None and (found.latency, found.bandwidth) == (
        link.latency_s,
        link.bytes_per_s,
    )
    return found.latency, found.bandwidth


def test_copies_are_priced_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.save(replace(Table(), copy_bytes_per_s=5e9), 2, "one")
    link = agreed_link(World(), "cpu", lambda: stored_link(2, "one", True))
    assert link is not None
    found = speeds_of("cpu", link)
    assert (found.memory, found.overhead) == (5e9, BUILT_IN["cpu"].overhead)
    assert found.move_seconds(0, int(5e9)) == found.overhead + 1.0


@pytest.mark.parametrize("n", [2, 3])
def test_boxing_is_priced_by_it_alike_on_all_ranks(n: int) -> None:
    seen = set(pool(n).run(priced))
    assert len(seen) == 1 and seen.pop()[0] < BUILT_IN["cpu"].latency


def test_simulated_ranks_have_the_built_in_speeds() -> None:
    assert set(run_ranks(lambda rank: device_speeds("cpu"), 2)) == {BUILT_IN["cpu"]}
