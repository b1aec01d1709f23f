"""Context that shields planning from the caller's modes, hooks, profilers and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _C


@contextmanager
def without_modes() -> Iterator[None]:
    """Run the body as if in a new thread: without modes, hooks, profilers, transforms or warnings.

    Gradients are tracked and no new tensor is an inference tensor. Autocast stays as it is, because
    it decides about dtypes.
    """
    anomaly, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    saved_modes = _C.set_aside()
    # Anomaly mode is set for the whole process, and reads values, which meta tensors do not have.
    if anomaly:
        torch.set_anomaly_enabled(False)
    try:
        with _without_warnings():
            yield
    finally:
        if anomaly:
            torch.set_anomaly_enabled(True, checks_nan)
        _C.bring_back(saved_modes)


_IGNORE_FILTER = ("ignore", None, Warning, None, 0)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings: the op warns when it runs on the shards, and would otherwise warn twice.

    The registries of past warnings that Python and torch keep are left as they are, so that a
    warning that is issued only once is issued when the op runs. ``warnings.catch_warnings`` would
    reset Python's registry, so the filter is inserted by hand. Torch leaves its own registry alone
    while ``set_warn_always`` is on.
    """
    filters, always = warnings.filters, torch.is_warn_always_enabled()
    filters.insert(0, _IGNORE_FILTER)  # type: ignore[attr-defined]
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(always)
        filters.remove(_IGNORE_FILTER)  # type: ignore[attr-defined]
