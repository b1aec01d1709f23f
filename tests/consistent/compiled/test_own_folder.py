"""Compiled code of other users is not loaded."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from consistent.compiled.backends.own_folder import CACHE_DIR_VARIABLE, use_own_folder


def make(kind: str, folder: Path) -> None:
    """What somebody may find in the place of the folder."""
    other = folder.with_name("other")
    other.mkdir()
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":  # of another user, in a folder where all may write, to one of this user's
        folder.symlink_to(other)
        os.chown(folder, 4242, 4242, follow_symlinks=False)
    elif kind == "another's":
        folder.mkdir()
        os.chown(folder, 4242, 4242)
    elif kind == "replaceable":
        folder.mkdir()
        folder.parent.chmod(0o777)
    elif kind == "file":
        folder.write_text("")


@pytest.mark.parametrize("kind", ["open", "replaceable", "file", "another's", "link"])
def test_a_folder_of_others_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("another's", "link") and os.geteuid():
        pytest.skip("only root gives files away")
    folder = tmp_path / "users" / "cache"
    folder.parent.mkdir()
    make(kind, folder)
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(folder))
    with pytest.warns(UserWarning, match="where torch keeps compiled code, is not a folder of"):
        use_own_folder()
    own = Path(os.environ[CACHE_DIR_VARIABLE])
    assert own != folder and stat.S_IMODE(own.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_own_folder()
    assert os.environ[CACHE_DIR_VARIABLE] == str(own)


def test_the_users_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))  # which torch makes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_own_folder()
    assert os.environ[CACHE_DIR_VARIABLE] == str(tmp_path / "cache")
