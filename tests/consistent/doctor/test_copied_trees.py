"""The doctor in trees that are not as a build left them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from consistent.doctor.finding import Finding
from tests.consistent.doctor.test_doctor import only

ROOT = Path(__file__).parents[3]


def test_it_runs_where_the_native_code_is_missing(tmp_path: Path) -> None:
    """By the path that the error names, and without the ranks, which cannot start there."""
    for package in ("consistent", "mirrored"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environ}
    failed = subprocess.run([sys.executable, "-c", "import consistent"], **run)
    (by_itself,) = re.findall(r"`(\S+ \S+doctor)` looks", failed.stderr)
    done = subprocess.run([*by_itself.split(), "--json"], **run)
    found = json.loads(done.stdout)
    assert done.returncode == 2, done.stderr
    bad = only(Finding(**f) for f in found["installation"] if "import consistent" in f["said"])
    assert "a native part of this package, cannot be loaded" not in bad.cure and "again" in bad.cure
    assert found["two ranks"][0]["cure"]


READ_ONLY = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # root may write where it must not, or not any longer
done = subprocess.run([sys.executable, "-c", "open('consistent/new', 'w')"], capture_output=True)
assert b"PermissionError" in done.stderr, done.stderr
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


def test_a_package_that_cannot_be_written_works_and_stays_as_it_is(tmp_path: Path) -> None:
    for package in ("consistent", "mirrored"):
        shutil.copytree(ROOT / package, tmp_path / package)
    every = sorted(tmp_path.rglob("*"))
    for path in every:
        path.chmod(path.stat().st_mode & ~0o222)
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environ}
    words = ["-m", "consistent", "doctor", "--json"]
    done = subprocess.run([sys.executable, "-c", READ_ONLY, *words], **run)
    assert done.returncode in (0, 1), (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert any("cannot be written, and need not" in f["said"] for f in found["installation"])
    assert not found["two ranks"][0]["cure"]
    assert sorted(tmp_path.rglob("*")) == every
