"""Planning runs as if no mode, hook or profiler were on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _C


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, this thread behaves like a new one: no mode, hook, profiler or transform of the
    user's sees what runs, gradients are tracked, nothing is an inference tensor, and no warnings
    are given.

    Autocast stays as it is, for it decides about dtypes.
    """
    anomaly, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    before = _C.set_aside()
    if anomaly:  # it is set for the whole process and reads values, which meta tensors do not have
        torch.set_anomaly_enabled(False)
    try:
        with _without_warnings():
            yield
    finally:
        if anomaly:
            torch.set_anomaly_enabled(True, checks_nan)
        _C.bring_back(before)


_IGNORE = ("ignore", None, Warning, None, 0)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings: the op warns when it runs on the shards, and would warn twice.

    The records that Python and torch keep of past warnings are left as they are, so that a warning
    that is given only once is given when the op runs: ``warnings.catch_warnings`` would reset
    Python's record, and torch leaves its own alone while it always warns.
    """
    filters, always = warnings.filters, torch.is_warn_always_enabled()
    filters.insert(0, _IGNORE)  # type: ignore[attr-defined]
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(always)
        filters.remove(_IGNORE)  # type: ignore[attr-defined]
