"""Notes on why a process ended, which it leaves with another rank for those that ask later."""

from __future__ import annotations

import sys
import traceback

from .place import is_user_frame, line_of_frame
from .wire import Address, ask

LEFT_GROUP = "has left the process group"
_MAX_ASKED = 3  # the most ranks to ask; the first one that answers keeps the note
_ASK_LIMIT_S = 0.2  # seconds that each of them may take


def send_note(note: str, rank: int, addresses: dict[int, Address]) -> None:
    """Send ``note``, the reason why this ``rank`` ends, to one of the three ranks after it.

    The first of them that answers keeps the note, for error messages of ranks that wait for this
    rank. ``addresses`` are those of the other ranks.
    """
    size = len(addresses) + 1
    for step in range(1, min(_MAX_ASKED, size - 1) + 1):
        keeper = (rank + step) % size
        if keeper in addresses:
            request = {"asks": "keep", "rank": rank, "note": note}
            if ask({keeper: addresses[keeper]}, request, _ASK_LIMIT_S).get(keeper) is not None:
                return


def exit_note() -> str:
    """Return why this process ends: the text of its uncaught error and its line, or no error."""
    # The interpreter sets it when it has printed an uncaught error.
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has ended: its program is done"
    lines = [
        line_of_frame(f, n) for f, n in traceback.walk_tb(error.__traceback__) if is_user_frame(f)
    ]
    text = f"has ended: {type(error).__name__}: {error}".partition("\n")[0]
    return text + (f", at {lines[-1]}" if lines else "")
