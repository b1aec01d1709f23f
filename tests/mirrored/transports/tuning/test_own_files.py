"""A cache is the user's own: what another user put in its place is neither read nor written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mirrored.transports.tuning import own_files, table
from mirrored.transports.tuning.table import Table

Foreign = Callable[[Path], None]


@pytest.fixture
def of_another(monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """Make a path belong to another user."""

    def change(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 4242, 4242, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 4242)

    return change


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a table that was kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table.save(Table(one_shot=5), 2, "one")
    assert table.load(2, "one") == Table(one_shot=5)
    return table.path(2, "one")


def test_a_folder_of_another_user_is_not_used(kept: Path, of_another: Foreign) -> None:
    of_another(kept.parent)
    with pytest.warns(UserWarning, match="another user's, or others may write in it"):
        assert table.load(2, "one") == Table()
    table.save(Table(one_shot=6), 2, "one")
    assert json.loads(kept.read_text())["one_shot"] == 5


def test_a_folder_that_all_write_in_is_not_used(kept: Path) -> None:
    kept.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="another user's, or others may write in it"):
        assert table.load(2, "one") == Table()
    with pytest.raises(PermissionError):
        own_files.append(kept, b"x")


def test_a_file_of_another_user_is_not_read(kept: Path, of_another: Foreign) -> None:
    of_another(kept)
    with pytest.warns(UserWarning, match="another user's, or others may write in it"):
        assert table.load(2, "one") == Table()
    assert own_files.read(kept) is None
    if os.geteuid() == 0:
        with pytest.raises(PermissionError):
            own_files.append(kept, b"x")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "large"])
def test_what_is_in_the_way_is_not_followed(kept: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    kept.unlink()
    if kind == "link":
        kept.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(kept)
    elif kind == "folder":
        kept.mkdir()
    else:
        kept.write_bytes(b" " * (own_files._MAX_BYTES + 1))
    assert own_files.read(kept) is None
    assert table.load(2, "one") is None  # it is this user's, and measured again
    if kind in ("link", "pipe"):
        with pytest.raises(OSError):
            own_files.append(kept, b"x")
    table.save(Table(one_shot=7), 2, "one")
    assert victim.read_text() == "precious"
    assert kind == "folder" or table.load(2, "one") == Table(one_shot=7)


def test_many_that_write_at_once_leave_one_whole_file(kept: Path) -> None:
    threads = [
        threading.Thread(target=table.save, args=(Table(one_shot=k), 2, "one")) for k in range(16)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = table.load(2, "one")
    assert found is not None and 0 <= found.one_shot < 16
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize("home", [None, "", "relative", "/proc/none"])
def test_without_a_home_nothing_is_kept_or_made(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user that nobody knows
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert table.load(2, "one") == Table()
    table.save(Table(), 2, "one")
    assert list(tmp_path.iterdir()) == []


WRONG: list[dict[str, Any]] = [
    {"one_shot": "5"}, {"one_shot": -1}, {"one_shot": True}, {"one_shot": 1.5},
    {"messages_above": [1]}, {"messages_above": {"all_reduce": "x"}}, {"messages_above": 3},
    {"latency_s": 0}, {"latency_s": float("nan")}, {"latency_s": float("inf")},
    {"latency_s": None}, {"bytes_per_s": -1.0}, {"copy_start_s": "1"}, {"copy_bytes_per_s": []},
]  # fmt: skip


def test_a_table_of_other_values_is_measured_again(kept: Path) -> None:
    for change in WRONG:
        kept.write_text(json.dumps({**asdict(Table()), **change}))
        assert table.load(2, "one") is None, change
    for text in ("[" * 100_000, "9" * 5000, "\ud800".encode("utf-8", "surrogatepass"), b"\xff"):
        kept.write_bytes(text.encode() if isinstance(text, str) else text)
        assert table.load(2, "one") is None
