"""Errors of compiled steps."""

from __future__ import annotations


class CannotRecord(RuntimeError):
    """Error: the step cannot become a program, because it does something that a program would do
    wrongly or not at all."""
