"""What the caches of a rank hold no longer."""

from __future__ import annotations

from consistent.auto.simulation.cache_model import CacheModel


def test_what_was_never_touched_is_cold_and_what_was_just_touched_is_not() -> None:
    recency = CacheModel(100)
    assert recency.cold_share_of_read(0, [(1, 10)]) == 1.0
    assert recency.cold_share_of_read(0, [(1, 10)]) == 0.0


def test_the_share_counts_bytes() -> None:
    recency = CacheModel(100)
    recency.record_write(0, [(1, 10)])
    assert recency.cold_share_of_read(0, [(1, 10), (2, 30)]) == 0.75


def test_what_is_touched_in_between_drives_out() -> None:
    recency = CacheModel(100)
    recency.record_write(0, [(1, 10), (2, 91)])
    assert (
        recency.cold_share_of_read(0, [(1, 10)]) == 1.0
    )  # 101 bytes since it was begun to be written
    assert recency.cold_share_of_read(0, [(2, 91)]) == 1.0
    assert recency.cold_share_of_read(0, [(2, 91)]) == 0.0


def test_each_rank_has_caches_of_its_own() -> None:
    recency = CacheModel(100)
    recency.record_write(0, [(1, 10)])
    recency.record_write(1, [(2, 1000)])
    assert recency.cold_share_of_read(0, [(1, 10)]) == 0.0


def test_nothing_is_not_cold() -> None:
    assert CacheModel(100).cold_share_of_read(0, []) == 0.0
