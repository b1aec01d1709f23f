from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mirrored.transports.tuning import table
from mirrored.transports.tuning.table import Table


def test_a_saved_table_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert table.load(2, "one") is None  # to be measured
    mine = Table(100, 50, {"all_gather_into_tensor": 7})
    table.save(mine, 2, "one")
    assert table.load(2, "one") == mine and table.load(3, "one") is None


def test_a_file_that_is_no_table_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.save(Table(), 2, "one")
    for text in ("", "{", '{"unknown": 1}', "[]"):
        table.path(2, "one").write_text(text)
        assert table.load(2, "one") is None


def test_the_built_in_table_serves_where_none_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert table.load(2, "one") == Table()
    table.save(Table(), 2, "one")  # says nothing


def test_a_row_holds_for_a_move_and_a_kind_of_numbers() -> None:
    mine = Table(messages_above={"all_gather_into_tensor": 10, "all_reduce narrow": 0})
    assert [mine.by_messages("all_gather_into_tensor", torch.float32, n) for n in (10, 11)] == [
        False,
        True,
    ]
    assert not mine.by_messages("all_gather_into_tensor", torch.bfloat16, 11)
    assert mine.by_messages("all_reduce", torch.float16, 1)
    assert not mine.by_messages("all_reduce", torch.int16, 1)


def test_a_file_of_fewer_rows_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.save(Table(), 2, "one")
    kept = json.loads(table.path(2, "one").read_text())
    del kept["latency_s"]
    table.path(2, "one").write_text(json.dumps(kept))
    assert table.load(2, "one") is None
