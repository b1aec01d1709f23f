"""Errors of compiled steps."""

from __future__ import annotations


class CannotRecord(RuntimeError):
    """Error: no program can be recorded that does all that the step does."""
