"""Checks that the imported files belong to one installation of this package only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from .finding import Finding

NAME = "torch-consistent"
_REINSTALL = f"`pip uninstall consistent {NAME}`, then install {NAME} again."


def check(consistent: Path, mirrored: Path) -> None:
    """Warn if another installation conflicts with the packages that are imported.

    Called by ``import consistent``.

    Args:
        consistent: the folder that the package ``consistent`` is imported from.
        mirrored: the folder that the package ``mirrored`` is imported from.

    Raises:
        ImportError: the two folders are not of one installation.
    """
    if consistent.parent != mirrored.parent:
        raise ImportError(
            f"consistent is imported from {consistent}, but mirrored from {mirrored}; they belong "
            f"together. Take one of the two folders out of PYTHONPATH and of the working folder, "
            f"or {_REINSTALL}"
        )
    for trouble in conflicts(consistent):
        warnings.warn(f"{trouble.said}. {trouble.cure}", RuntimeWarning, stacklevel=3)


def conflicts(consistent: Path) -> Iterator[Finding]:
    """Yield a finding for each installed distribution that conflicts with ``consistent``.

    ``consistent`` is the folder of the package. In conflict are another distribution that has
    installed files into this folder, and an installation of this package in another folder.
    """
    for distribution in distributions(name="consistent"):
        if _package_folder(distribution) == consistent and _installs_files(distribution):
            yield Finding(
                f"the distribution `consistent` {distribution.version} is installed into "
                f"{consistent}, and so is {NAME}: one has overwritten files of the other",
                _REINSTALL,
            )
    for own_distribution in distributions(name=NAME):
        folder = _package_folder(own_distribution)
        if folder != consistent and folder.is_dir():
            yield Finding(
                f"{NAME} {own_distribution.version} is installed in {folder.parent}, but what is "
                f"imported lies in {consistent.parent}",
                "Uninstall one of them, or start Python elsewhere.",
            )


def _package_folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file("consistent"))).resolve()


def _installs_files(distribution: Distribution) -> bool:
    """Return whether a distribution has itself installed files of the package ``consistent``.

    An editable installation has not: it has only a path to them.
    """
    return any(file.parts[0] == "consistent" for file in distribution.files or ())
