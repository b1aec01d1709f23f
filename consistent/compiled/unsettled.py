"""A step that left something changed which its program would not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Unsettled(NamedTuple):
    """Numbers, lengths and places that are not as they were before the step. None: all are, but not
    on another rank."""

    paths: Sequence[str]

    def text(self, name: str) -> str:
        """Why it cannot be a program."""
        if not self.paths:
            return f"{name}: on another rank each call changes its state."
        shown = ", ".join(self.paths[:3])
        return (
            f"{name}: each call of the step changes {shown}, which Python keeps and a program "
            "would not change.\n  Keep what changes from step to step in a tensor that is a buffer "
            "or an argument, or change it outside the step."
        )
