"""Checks of the installation: versions, native code, compiler, packages, settings, caches."""

from __future__ import annotations

import difflib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

from .finding import Finding
from .owners import conflicts

NATIVE = ("consistent.dispatch._C", "consistent.forms.native._C", "mirrored.transports._C")
OLDEST_TORCH = (2, 11)
_IMPORT_S = 120.0

# Variables that the library, its build, tests and examples read.
VARIABLES = frozenset(
    """CONSISTENT_CHECK CONSISTENT_CLONES CONSISTENT_COMPARE_PLAIN CONSISTENT_CUDA
    CONSISTENT_ELASTIC CONSISTENT_HOST CONSISTENT_KEEP_FREED_MEMORY CONSISTENT_MNIST
    CONSISTENT_MNIST_STEPS CONSISTENT_NCCL CONSISTENT_PROGRAMS CONSISTENT_RANK_PROCESS
    CONSISTENT_SHARED_MEMORY CONSISTENT_SHOW CONSISTENT_TEST_ALL CONSISTENT_TEST_KILLS
    CONSISTENT_WITH_CUDA
    """.split()
)

# Package -> what needs it.
OPTIONAL = {
    "safetensors": "save_full and from_pretrained",
    "scipy": 'plan="auto" and layouts="auto"',
    "yaml": "plans as YAML files",
    "matplotlib": "pictures as PNG",
}


def version(package: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    libc = " ".join(platform.libc_ver()) or platform.system()
    yield Finding(f"Python {platform.python_version()}, numpy {version('numpy')}, {libc}")
    torch = version("torch")
    if torch is None:
        yield Finding(
            f"torch is not installed for {sys.executable}",
            "Install the torch that you want, for example `pip install torch==2.13.0`, and then "
            "this package.",
        )
        return
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        yield Finding(
            f"torch {torch}; this package needs 2.11 or newer",
            "Install a newer one, for example `pip install torch==2.13.0`, and then this package "
            "again.",
        )
        return
    yield Finding(f"torch {torch}")


def _package() -> Iterator[Finding]:
    package_folder = Path(__file__).resolve().parents[1]
    yield from conflicts(package_folder)
    if platform.system() != "Linux":
        yield Finding(
            f"this is {platform.system()}; ranks share memory and watch each other on Linux only",
            "Run it under Linux (on Windows in WSL 2). Elsewhere ranks send messages, and nothing "
            "was tried.",
        )
    else:
        suffix = (
            ""
            if os.access(package_folder, os.W_OK)
            else ", which cannot be written, and need not be"
        )
        yield Finding(f"consistent lies in {package_folder}{suffix}")


# Prints where the native modules are, and for which GPUs torch is built.
_IMPORT_SCRIPT = """
import sys, torch, consistent
print(*(sys.modules[name].__file__ for name in sys.argv[1:]))
said = "torch is built without CUDA"
if torch.version.cuda:
    said = f"torch is built for CUDA {torch.version.cuda}"
    if torch.distributed.is_nccl_available():
        said += " with NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    said += f", GPUs found: {torch.cuda.device_count()}"
print(said)
"""


def _native_modules() -> Iterator[Finding]:
    """Check, in another process, that ``import consistent`` loads the native modules.

    A wrong build may crash the process that imports it.
    """
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.run(
            [sys.executable, "-c", _IMPORT_SCRIPT, *NATIVE], capture_output=True, text=True,
            timeout=_IMPORT_S, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        ending = f"it ended with status {process.returncode}"
        error = (process.stderr.strip() or ending) if process.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"it has not ended after {_IMPORT_S:g} s"
    if not error:
        files, gpus = process.stdout.splitlines()
        folder = Path(files.split()[0]).parent
        builds = ", ".join(sorted(path.name for path in folder.parent.glob("torch[0-9]*")))
        yield Finding(
            f"`import consistent` works; of its builds ({builds}) that for this torch is loaded, "
            f"{folder.name}"
        )
        yield Finding(gpus)
        return
    lines = error.splitlines()
    message = next((line for line in lines if re.match(r"\w+Error: ", line)), lines[-1])
    yield Finding(
        f"`import consistent` fails: {message}",
        "Install the package again beside this torch and Python: a wheel that was built for them, "
        "or `pip install --no-build-isolation .` in its source tree (`make build` in a clone), "
        "with a C++ compiler.",
    )


def _compiler() -> Iterator[Finding]:
    name = os.environ.get("CXX", "c++").split()[0]
    compiler = shutil.which(name) or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        nvcc = shutil.which("nvcc")
        yield Finding(f"C++ compiler {compiler}{f', nvcc {nvcc}' if nvcc else ', no nvcc'}")
        return
    if util.find_spec("torch") is not None and version("torch-consistent") is not None:
        yield Finding("no C++ compiler; one is needed to build from source only")
        return
    yield Finding(
        f"no C++ compiler: neither `{name}` nor g++ nor clang++ is on the PATH",
        "`apt install g++`, `conda install gxx`, or name one in CXX; a wheel needs none.",
    )


def _packages() -> Iterator[Finding]:
    missing = {name: use for name, use in OPTIONAL.items() if util.find_spec(name) is None}
    for name, use in missing.items():
        package = {"yaml": "pyyaml"}.get(name, name)
        yield Finding(
            f"{name} is not installed; {use} need it", f"`pip install {package}`.", optional=True
        )
    if not missing:
        yield Finding(f"optional packages are there: {', '.join(OPTIONAL)}")


def _variables(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    names = sorted(name for name in environ if name.startswith("CONSISTENT"))
    for name in names:
        if name in VARIABLES:
            yield Finding(f"{name}={environ[name]}")
            continue
        close = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"Did you mean {close[0]}?" if close else "Unset it."
        yield Finding(f"{name} is set, and nothing reads it", hint)


def _cache() -> Iterator[Finding]:
    """Check the user's cache folder, in which timings and compiled steps are stored.

    It is the folder of ``mirrored/transports/tuning/own_files.py``, which a process neither reads
    nor writes if others may write to it.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():
        yield Finding(
            f"the folder of caches is {root}, which is relative and would be another one in each "
            "working folder: nothing is kept or read there",
            "Set XDG_CACHE_HOME to an absolute path, or unset it.",
        )
        return
    folder = root / "consistent"
    place = folder
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    status = place.stat()
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    if status.st_uid not in (user, 0) or (folder.exists() and status.st_mode & stat.S_IWOTH):
        yield Finding(
            f"{place} is another user's, or others may write in it; nothing is kept or read there",
            "Set XDG_CACHE_HOME to a folder of your own, or `chmod o-w` it.",
        )
    elif not os.access(place, os.W_OK):
        yield Finding(
            f"{place} cannot be written: each process measures and compiles what it needs again",
            "Set XDG_CACHE_HOME to a folder that can be written.",
        )
    else:
        yield Finding(f"timings and compiled steps are kept in {folder}")


CHECKS = (_versions, _package, _native_modules, _compiler, _packages, _variables, _cache)
