"""Outcome of a recording whose step changed state that its program would not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Unsettled(NamedTuple):
    """The paths of numbers, lengths and places that the step has changed. Empty if only another
    rank has such changes."""

    paths: Sequence[str]

    def text(self, name: str) -> str:
        """Return the explanation of why the step cannot be a program."""
        if not self.paths:
            return f"{name}: on another rank each call changes its state."
        shown = ", ".join(self.paths[:3])
        return (
            f"{name}: each call of the step changes {shown}, which Python keeps and a program "
            "would not change.\n  Keep what changes from step to step in a tensor that is a buffer "
            "or an argument, or change it outside the step."
        )
