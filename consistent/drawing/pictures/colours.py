"""Colours of the pieces of tensors, in drawings and in a terminal."""

from __future__ import annotations

import os
import sys

# Tableau's ten colours without grey, distinct on white and on black.
# Source: tableau.com, "Tableau 10".
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
    "#edc948", "#b07aa1", "#ff9da7", "#9c755f",
)  # fmt: skip
# The nearest of the 256 terminal colours.
TERMINAL = (67, 208, 71, 203, 109, 221, 139, 217, 137)

Style = int | str | None  # index of a piece's colour, "bold" or "dim", or None for no style


def colour(index: int) -> str:
    """Return the colour of the piece with this index; colours repeat after nine."""
    return PALETTE[index % len(PALETTE)]


def paler(colour: str) -> str:
    """Return a ``#rrggbb`` colour mixed half and half with white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(c + 255) // 2:02x}" for c in channels)


def paint(text: str, style: Style, coloured: bool) -> str:
    """Return ``text`` with a terminal style, or unchanged if not ``coloured``.

    ``style`` is the index of a colour, "bold", "dim" or None.
    """
    if not coloured or style is None or not text.strip():
        return text
    codes = {"bold": "1", "dim": "2"}
    code = codes[style] if isinstance(style, str) else f"38;5;{TERMINAL[style % len(TERMINAL)]}"
    return f"\x1b[{code}m{text}\x1b[0m"


def shows_colours() -> bool:
    """Return whether text that is printed to standard output may have colours.

    It must be a terminal that supports them, and NO_COLOR must not be set (no-color.org).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stdout, "isatty", lambda: False)())


def shows_blocks() -> bool:
    """Return whether standard output can encode characters such as a full block."""
    try:
        "█░▒├└─│·…×".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
