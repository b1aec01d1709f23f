"""Files are whole or not there wherever the disk fails, and every rank raises the same."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.compiling import CXX, ROOT, run
from tests.launch import free_port
from tests.ranks import ALL

FAULTS = [] if ALL else ["full", "one error"]  # [] stands for all of them
WRITERS = ROOT / "tests" / "disks" / "writers.py"

# The library that stands before the disk must be there when an interpreter starts: so one imports
# torch and becomes the first rank, and the other rank is its child, which ends with it.
TWO_RANKS = """
import ctypes, importlib, os, runpy, signal, sys
from tests.launch import IMPORTED, of_rank

for name in (*IMPORTED, "consistent.flow", "consistent.visualize.visualize"):
    importlib.import_module(name)

port, program, *sys.argv[1:] = sys.argv[1:]
child = os.fork()
if not child:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.environ.update(of_rank(0 if child else 1, 2, int(port)))
runpy.run_path(program, run_name="__main__")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(CXX is None or sys.platform != "linux", reason="needs a compiler, and Linux")
def test_each_call_of_each_writer_fails_in_turn(tmp_path: Path) -> None:
    library, port = tmp_path / "faulty_disk.so", free_port()
    run("cc", "-shared", "-fPIC", WRITERS.with_name("faulty_disk.c"), "-o", library, "-ldl")
    (tmp_path / "files").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, str(port), WRITERS, tmp_path / "files", *FAULTS],
        env={**os.environ, "LD_PRELOAD": str(library)}, cwd=ROOT, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
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
        text = path.read_text()
        if not re.search("open|write_text|write_bytes", text):  # a tree of each takes a second
            continue
        for node in ast.walk(ast.parse(text)):
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
