"""Files are whole or not there wherever the disk fails, and every rank raises the same."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.compiling import CXX, ROOT, run
from tests.launch import free_port, of_rank
from tests.ranks import ALL

FAULTS = [] if ALL else ["full", "one error"]  # [] stands for all of them
WRITERS = ROOT / "tests" / "disks" / "writers.py"


@pytest.mark.skipif(CXX is None or sys.platform != "linux", reason="needs a compiler, and Linux")
def test_each_call_of_each_writer_fails_in_turn(tmp_path: Path) -> None:
    library, port = tmp_path / "faulty_disk.so", free_port()
    run("cc", "-shared", "-fPIC", WRITERS.with_name("faulty_disk.c"), "-o", library, "-ldl")
    (tmp_path / "files").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, WRITERS, tmp_path / "files", *FAULTS], text=True, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **of_rank(rank, 2, port), "LD_PRELOAD": str(library)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in printed)
    told = json.loads(printed[0][0].splitlines()[-1])
    assert not told["wrong"], "\n".join(told["wrong"])
    assert min(told["counts"].values()) >= 3 * (len(FAULTS) or 7), told["counts"]


# Where files are written under a name that no reader takes for theirs, or are the library's own.
WRITE_BY_THEMSELVES = {
    "mirrored/whole_files.py",
    "mirrored/transports/tuning/own_files.py",  # append: half a line is passed over
    "consistent/checkpoint/files/index.py",  # into the folder of an unfinished checkpoint
    "consistent/checkpoint/files/pieces.py",
    "consistent/checkpoint/full.py",
    "consistent/checkpoint/saving/owner.py",  # a mark
    "consistent/auto/machines/measurement_cache.py",  # a lock
    "consistent/command/one_rank.py",  # between a process and its child
    "consistent/doctor/self_test.py",
    "consistent/verification/worlds.py",  # between a process and its children
}


def test_nothing_else_in_the_library_writes_files() -> None:
    found = set()
    for path in (path for top in ("consistent", "mirrored") for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _writes(node):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == WRITE_BY_THEMSELVES


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    given = [*call.args, *(each.value for each in call.keywords)]
    texts = [x.value for x in given if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    if name.endswith(("write_text", "write_bytes")):
        return True
    if name == "open" or name.endswith((".open", "fdopen")):
        return any(set(text) <= set("rwaxb+") and set(text) & set("wax+") for text in texts)
    return False
