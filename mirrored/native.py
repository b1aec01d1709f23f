"""What is said where a native module cannot be loaded."""

from __future__ import annotations

import torch


def not_loaded(module: str, error: ImportError) -> ImportError:
    """The error to raise instead: which module, why there is no going on, and what to do."""
    return ImportError(
        f"{module}, a native part of this package, cannot be loaded: {error}.\n"
        "  Ops and messages between ranks run in it, and there is no form of it in Python. It is "
        "missing in a source tree that was not built, and does not load with another release of "
        f"torch than it was built with; this is torch {torch.__version__}.\n"
        "  Install the package again beside this torch: `pip install --no-build-isolation .` in "
        "its source tree (`make build` in a clone), with a C++ compiler, or a wheel that was built "
        "for this torch.",
        name=module,
    )
