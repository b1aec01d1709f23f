"""Selects the build of a native module that fits this torch, or explains why none does.

A package with native code has a folder for each release of torch that its module was built for:
``consistent/dispatch/torch2_13/_C.cpython-311-x86_64-linux-gnu.so``. A wheel has several such
folders, a source build only the one for the torch that it found. The folder is put into the
package's search path, so that ``from . import _C`` finds the module in it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

OLDEST = (2, 11)
_DOCTOR = Path(__file__).resolve().parents[1] / "consistent" / "doctor"  # runs standalone
_SOURCE = (
    "`pip install --no-build-isolation .` in its source tree (`make build` in a clone), with a C++ "
    "compiler"
)


def load_build(package: str) -> None:
    """Load ``package._C`` for the installed torch; raise ImportError if no build fits."""
    module = f"{package}._C"
    path = sys.modules[package].__path__
    folder = str(find_build(Path(path[0]), module))
    if folder not in path:
        # At the front, so that a module of an older build in the package itself is not found first.
        path.insert(0, folder)
    try:
        import_module(module)
    except ImportError as error:
        raise load_error(
            module,
            f"{error}. The build is for torch {torch_release()} and lies in {folder}",
            f"Install the package again beside this torch, from a wheel or by {_SOURCE}.",
        ) from error


def torch_release() -> str:
    """Return the release of the installed torch, such as "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])


def builds_by_release(package: Path) -> dict[str, Path]:
    """Return the folders of a package's builds by release of torch, oldest first.

    For example ``{"2.12": package / "torch2_12", "2.13": package / "torch2_13"}``.
    """
    folders = {
        p.name.removeprefix("torch").replace("_", "."): p for p in package.glob("torch[0-9]*_*")
    }
    return {name: folders[name] for name in sorted(folders, key=_version_numbers)}


def find_build(package: Path, module: str) -> Path:
    """Return the folder whose build fits this torch and Python; raise ImportError if none does.

    ``package`` is the package's folder, and ``module`` the name of its native module for errors.
    """
    folders = builds_by_release(package)
    names = " and ".join(folders)
    if _version_numbers(torch_release()) < OLDEST:
        why, cure = "it is written for torch 2.11 and newer", "Install one of these."
    elif not folders:
        why = f"{package.name}/ has no build at all, as in a source tree that was not built"
        cure = f"Install a wheel, or build it by {_SOURCE}."
    elif torch_release() not in folders:
        why = f"there are builds for torch {names} only"
        cure = f"Install one of these, a newer release of this package, or build it by {_SOURCE}."
    elif not any(
        (folders[torch_release()] / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES
    ):
        files = sorted(p.name for p in folders[torch_release()].glob("_C*"))
        if any(name.startswith(f"_C.{sys.implementation.cache_tag}-") for name in files):
            built_for = (
                f"another C library or processor than this Python's ({EXTENSION_SUFFIXES[0]})"
            )
        else:
            built_for = f"another Python than this {sys.version.split()[0]}"
        why = f"the build is for {built_for}: {', '.join(files)}"
        cure = f"Install the wheel for this Python with its own pip, or build it by {_SOURCE}."
    else:
        return folders[torch_release()]
    raise load_error(module, why, cure)


def load_error(module: str, why: str, remedy: str) -> ImportError:
    """Return the error for a native module that cannot be loaded, with the reason and a remedy."""
    system = ""
    if sys.platform != "linux":
        system = (
            f"  It is written for Linux, and this is {sys.platform}: use it there (on Windows in "
            "WSL 2, on a Mac in a container).\n"
        )
    return ImportError(
        f"{module}, a native part of this package, cannot be loaded beside torch "
        f"{torch.__version__}: {why}.\n{system}"
        "  Ops and messages between ranks run in it, and there is no form of it in Python.\n"
        f"  {remedy}\n"
        f"  `{sys.executable} {_DOCTOR}` looks for what else is not well.",
        name=module,
    )


def _version_numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))
