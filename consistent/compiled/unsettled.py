"""Result of a recording that is no program yet, because the step changed Python state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Unsettled(NamedTuple):
    """Result of a recording whose step changed Python state that a program would leave unchanged.

    The step is recorded again in its next calls, up to a limit. ``paths`` names the numbers,
    lengths and objects that changed; it is empty if only another rank has such changes.
    """

    paths: Sequence[str]

    def text(self, name: str) -> str:
        """Return the message why the step ``name`` cannot be a program, after the last try."""
        if not self.paths:
            return f"{name}: on another rank each call changes its state."
        paths_text = ", ".join(self.paths[:3])
        return (
            f"{name}: each call of the step changes {paths_text}, which Python keeps and a program "
            "would not change.\n  Keep what changes from step to step in a tensor that is a buffer "
            "or an argument, or change it outside the step."
        )
