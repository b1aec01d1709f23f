"""The doctor in trees that are not as a build left them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from consistent.doctor import installation
from consistent.doctor.finding import Finding
from tests.consistent.doctor.test_doctor import only
from tests.launch import launch

ROOT = Path(__file__).parents[3]


def test_it_runs_where_the_native_code_is_missing(tmp_path: Path) -> None:
    """By the path that the error names, and without the ranks, which cannot start there."""
    for package in ("consistent", "mirrored"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
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


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What the doctor tells of a package that cannot be written, in a shell that a launcher has
    left variables in. Its start of ranks, and of the interpreter that tries an import, takes
    seconds; so this is the one run of a healthy package."""
    folder = tmp_path_factory.mktemp("read only")
    for package in ("consistent", "mirrored"):
        shutil.copytree(ROOT / package, folder / package)
    every = sorted(folder.rglob("*"))
    for path in every:
        path.chmod(path.stat().st_mode & ~0o222)
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "no-such-host.invalid"}
    words = ["-m", "consistent", "doctor", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, *words], capture_output=True, text=True, cwd=folder,
        env=environ,
    )  # fmt: skip
    assert done.returncode in (0, 1), (done.stdout, done.stderr)
    assert sorted(folder.rglob("*")) == every
    return {title: [Finding(**f) for f in each] for title, each in json.loads(done.stdout).items()}


def test_a_package_that_cannot_be_written_works_and_stays_as_it_is(
    told: dict[str, list[Finding]],
) -> None:
    assert any("cannot be written, and need not" in f.said for f in told["installation"])
    assert not told["two ranks"][0].cure


def test_two_ranks_do_all_that_the_self_test_has(told: dict[str, list[Finding]]) -> None:
    found = told["two ranks"]
    assert not any(f.cure for f in found), found
    assert "did a gather, a reduction, a gradient, a checkpoint" in found[0].said
    assert any(f.said.startswith("CPU tensors: ") for f in found)


def test_it_says_which_cuda_and_nccl_torch_is_built_for(
    told: dict[str, list[Finding]], tmp_path: Path
) -> None:
    (gpus,) = (f for f in told["installation"] if f.said.startswith("torch is built "))
    cuda = torch.version.cuda
    assert not gpus.cure and gpus.said.startswith(
        f"torch is built for CUDA {cuda}" if cuda else "torch is built without CUDA"
    )
    assert ("NCCL" in gpus.said) == torch.distributed.is_nccl_available()
    # As for a torch with both, and no GPU.
    both = 'torch.version.cuda = "13.2"; torch.distributed.is_nccl_available = lambda: True'
    version = "torch.cuda.nccl.version = lambda: (2, 30, 7); torch.cuda.device_count = lambda: 0"
    program = installation._IMPORT_SCRIPT.replace(
        "consistent\n", f"consistent\n{both}; {version}\n"
    )
    path = tmp_path / "loading.py"
    path.write_text(program)
    ran = launch(path, ranks=1)
    assert ran.printed == ["\ntorch is built for CUDA 13.2 with NCCL 2.30.7, GPUs found: 0\n"], ran
