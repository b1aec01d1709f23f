"""A build does not keep modules, or parts of them, that were built with other flags."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.csrc.compiling import ROOT
from tests.launch import Started

# Writes its arguments into a file and makes what it is asked for, without compiling anything. The
# trial of setup.py fails as with a libstdc++ that is linked as an archive.
COMPILER = """#!/bin/sh
out=""; deps=""; last=""
for word in "$@"; do
    case "$last" in -o) out="$word";; -MF) deps="$word";; esac
    last="$word"
done
[ -n "$out" ] || exec g++ "$@"
case "$out" in *older.so) [ -z "$FAKE_STATIC" ]; exit $?;; esac
echo "$@" >> "$FAKE_LOG"
[ -z "$deps" ] || echo "$out:" > "$deps"
mkdir -p "$(dirname "$out")" && echo made > "$out"
"""

# A build, in a process that has torch imported already.
BUILD = """
import os, runpy, sys
os.chdir(sys.argv[1])
sys.argv[:] = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _build(folder: Path, static: str) -> list[str]:
    """The commands of a build in ``folder``."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    names = {"CXX": str(folder / "tools" / "c++"), "CC": str(folder / "tools" / "c++")}
    environment = names | {
        "PATH": f"{folder / 'tools'}:{os.environ['PATH']}",
        "FAKE_LOG": str(log), "FAKE_STATIC": static, "CONSISTENT_CUDA": "0", "MAX_JOBS": "1",
    }  # fmt: skip
    (folder / "build.py").write_text(BUILD)
    done = Started(folder / "build.py", str(folder), environment=environment)
    done.wait(120)
    done.kill()
    assert done.status == 0, done.printed + done.errors
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("with_ninja", [True, False])
def test_other_flags_build_all_anew(with_ninja: bool, tmp_path: Path) -> None:
    if with_ninja and shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("tests"))
    for package in ("consistent/dispatch", "consistent/forms/native", "mirrored/transports"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "tools").mkdir()
    _script(tmp_path / "tools" / "c++", COMPILER)
    if not with_ninja:
        _script(tmp_path / "tools" / "ninja", "#!/bin/sh\nexit 1\n")
    first = _build(tmp_path, "")
    second = _build(tmp_path, "yes")
    compiled = [[line for line in each if " -c " in line] for each in (first, second)]
    assert len(compiled[0]) == len(compiled[1]) > 9
    flag = "-DCONSISTENT_STATIC_LIBSTDCXX"
    assert [sum(flag in line for line in each) for each in compiled] == [0, len(compiled[0])]
    assert len(list(tmp_path.glob("**/torch*/_C.*.so"))) >= 3
