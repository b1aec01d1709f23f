"""Errors of compiled steps."""

from __future__ import annotations


class CannotRecord(RuntimeError):
    """Error: the step cannot become a program, which would do something wrongly or not at all."""
