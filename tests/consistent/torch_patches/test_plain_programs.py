"""An import changes nothing, and use of the library nothing for tensors that are not global."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.ranks import ALL

ROOT = Path(__file__).parents[3]
PROGRAMS = "tests.consistent.torch_patches.plain_programs"
SETTINGS = (
    "ATEN",
    "CONSISTENT",
    "DNNL",
    "KMP",
    "MKL",
    "OMP",
    "ONEDNN",
    "PYTHON",
    "PYTORCH",
    "TORCH",
)


def _said(*modes: str) -> list[str]:
    """What the programs print with the library not imported, imported, or used before: each mode in
    a fork of one interpreter that has imported torch, which takes longer than the programs do."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAMS, folder, *modes], env=env, cwd=ROOT, timeout=300,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return [Path(folder, mode).read_text() for mode in modes]


def _kept() -> Path:
    """Where what they print without the library is kept, by what it can depend on."""
    processor = Path("/proc/cpuinfo")
    said = processor.read_text() if processor.exists() else ""
    parts = [
        Path(__file__).with_name("plain_programs.py").read_text(),
        sys.version,
        torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),
        *sorted({line for line in said.splitlines() if line.startswith(("model name", "flags"))}),
        *sorted(f"{each.name} {each.version}" for each in distributions()),
        *sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(SETTINGS)),
    ]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    return ROOT / "build" / "plain_programs" / f"{name}.txt"


def _keep(said: str) -> None:
    kept = _kept()
    kept.parent.mkdir(parents=True, exist_ok=True)
    partly = kept.with_suffix(f".{os.getpid()}")
    partly.write_text(said)
    partly.replace(kept)


@pytest.mark.parametrize("mode", ["imported", "used"] if ALL else ["used"])
def test_plain_programs_do_what_they_did(mode: str) -> None:
    kept = _kept()
    wanted = kept.read_text() if kept.exists() else ""
    said = _said(mode)[0] if wanted else ""
    if not said or said != wanted:
        wanted, said = _said("none", mode)
        _keep(wanted)
    pairs = zip(wanted.splitlines(), said.splitlines(), strict=False)
    differing = [f"{a}\n  {mode}: {b}" for a, b in pairs if a != b]
    assert not differing, "\n".join(differing[:20])
    assert len(wanted.splitlines()) == len(said.splitlines()) > 1000
