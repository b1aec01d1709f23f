"""What is said where a native module cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_DOCTOR = Path(__file__).resolve().parents[1] / "consistent" / "doctor"  # runs by itself


def not_loaded(module: str, error: ImportError) -> ImportError:
    """The error to raise instead: which module, why there is no going on, and what to do."""
    system = ""
    if sys.platform != "linux":
        system = (
            f"  It is written for Linux, and this is {sys.platform}: use it there (on Windows in "
            "WSL 2, on a Mac in a container).\n"
        )
    return ImportError(
        f"{module}, a native part of this package, cannot be loaded: {error}.\n{system}"
        "  Ops and messages between ranks run in it, and there is no form of it in Python. It is "
        "missing in a source tree that was not built, and does not load with another release of "
        f"torch than it was built with; this is torch {torch.__version__}.\n"
        "  Install the package again beside this torch: `pip install --no-build-isolation .` in "
        "its source tree (`make build` in a clone), with a C++ compiler, or a wheel that was built "
        "for this torch.\n"
        f"  `{sys.executable} {_DOCTOR}` looks for what else is not well.",
        name=module,
    )
