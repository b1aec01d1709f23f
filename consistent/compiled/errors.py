"""What is raised where a step cannot be a program."""

from __future__ import annotations


class CannotRecord(RuntimeError):
    """The step does something that a program of it would do wrongly, or not at all."""
