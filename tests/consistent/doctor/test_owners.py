"""Installations that do not go together are named at the first import."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistent.doctor import owners


def installed(site: Path, name: str, files: str) -> None:
    """What pip leaves of a distribution of this name."""
    (site / "consistent").mkdir(parents=True, exist_ok=True)
    (site / "consistent" / "__init__.py").touch()  # Python 3.13 lists files that are there alone
    info = site / f"{name.replace('-', '_')}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
    (info / "RECORD").write_text(files)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages, the first in which Python looks, without the real ones."""
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    return tmp_path / "site"


def test_one_installation_has_no_trouble(site: Path) -> None:
    installed(site, "torch-consistent", "consistent/__init__.py,,\n")
    assert list(owners.conflicts(site / "consistent")) == []


def test_another_distribution_of_this_name_is_named(site: Path) -> None:
    installed(site, "torch-consistent", "consistent/__init__.py,,\n")
    installed(site, "consistent", "consistent/__init__.py,,\n")
    (trouble,) = owners.conflicts(site / "consistent")
    assert "`consistent` 0.3" in trouble.said
    assert "pip uninstall consistent torch-consistent" in trouble.cure
    with pytest.warns(RuntimeWarning, match="has overwritten files"):
        owners.check(site / "consistent", site / "mirrored")


def test_an_editable_one_of_the_earlier_name_has_no_files_there(site: Path) -> None:
    installed(site, "consistent", "__editable__.consistent-0.3.pth,,\n")
    assert list(owners.conflicts(site / "consistent")) == []


def test_two_installations_are_both_named(site: Path, tmp_path: Path) -> None:
    installed(site, "torch-consistent", "consistent/__init__.py,,\n")
    (trouble,) = owners.conflicts(tmp_path / "clone" / "consistent")
    assert str(site) in trouble.said and str(tmp_path / "clone") in trouble.said


def test_packages_of_two_installations_do_not_run_together(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="they belong together"):
        owners.check(tmp_path / "a" / "consistent", tmp_path / "b" / "mirrored")
