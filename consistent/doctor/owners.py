"""Checks that the imported files belong to one installation of this package only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from .finding import Finding

NAME = "torch-consistent"
_AGAIN = f"`pip uninstall consistent {NAME}`, then install {NAME} again."


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
            f"or {_AGAIN}"
        )
    for trouble in troubles(consistent):
        warnings.warn(f"{trouble.said}. {trouble.cure}", RuntimeWarning, stacklevel=3)


def troubles(consistent: Path) -> Iterator[Finding]:
    """Yield a finding for each installed distribution that conflicts with ``consistent``.

    ``consistent`` is the folder of the package. In conflict are another distribution that has
    installed files into this folder, and an installation of this package in another folder.
    """
    for other in distributions(name="consistent"):
        if _folder(other) == consistent and _installs(other):
            yield Finding(
                f"the distribution `consistent` {other.version} is installed into {consistent}, "
                f"and so is {NAME}: one has overwritten files of the other",
                _AGAIN,
            )
    for ours in distributions(name=NAME):
        folder = _folder(ours)
        if folder != consistent and folder.is_dir():
            yield Finding(
                f"{NAME} {ours.version} is installed in {folder.parent}, but what is imported lies "
                f"in {consistent.parent}",
                "Uninstall one of them, or start Python elsewhere.",
            )


def _folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file("consistent"))).resolve()


def _installs(distribution: Distribution) -> bool:
    """Return whether a distribution has itself installed files of the package ``consistent``.

    An editable installation has not: it has only a path to them.
    """
    return any(file.parts[0] == "consistent" for file in distribution.files or ())
