"""Errors of compiled steps."""

from __future__ import annotations


class CannotRecord(RuntimeError):
    """The step does something that its program would do wrongly, or not at all."""
