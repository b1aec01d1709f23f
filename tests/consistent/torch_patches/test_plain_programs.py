"""An import changes nothing, and use of the library nothing for tensors that are not global."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ALL

ROOT = Path(__file__).parents[3]


@functools.cache
def _said(mode: str) -> list[str]:
    """What the programs print with the library not imported, imported, or used before."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.consistent.torch_patches.plain_programs", mode]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("mode", ["imported", "used"] if ALL else ["used"])
def test_plain_programs_do_what_they_did(mode: str) -> None:
    wanted, found = _said("none"), _said(mode)
    differing = [f"{a}\n  {mode}: {b}" for a, b in zip(wanted, found, strict=False) if a != b]
    assert not differing, "\n".join(differing[:20])
    assert len(wanted) == len(found) > 1000
