"""A few of the kills of benchmarks/checkpoint_kills.py."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoint_kills import kills


def test_a_training_that_is_killed_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    found = list(kills(3, seed=1, folder=str(tmp_path)))
    assert len(found) == 3 and all(each.latest >= each.saved > 0 for each in found)
    assert found[0].latest <= found[-1].latest  # on a busy machine a kill may come before a save
