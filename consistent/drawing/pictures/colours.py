"""The colours of pieces, in drawings and in a terminal."""

from __future__ import annotations

import os
import sys

# Tableau's ten, without grey: told apart on white and on black. Source: tableau.com, "Tableau 10".
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
    "#edc948", "#b07aa1", "#ff9da7", "#9c755f",
)  # fmt: skip
# The nearest of the 256 colours that terminals know.
TERMINAL = (67, 208, 71, 203, 109, 221, 139, 217, 137)

Style = int | str | None  # number of a piece's colour; "bold", "dim"; None


def colour(index: int) -> str:
    """The colour of piece ``index``; they repeat after nine."""
    return PALETTE[index % len(PALETTE)]


def paler(colour: str) -> str:
    """A ``#rrggbb`` colour, half way to white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(c + 255) // 2:02x}" for c in channels)


def paint(text: str, style: Style, coloured: bool) -> str:
    """``text`` in a style, for a terminal; as it is if not ``coloured``."""
    if not coloured or style is None or not text.strip():
        return text
    codes = {"bold": "1", "dim": "2"}
    code = codes[style] if isinstance(style, str) else f"38;5;{TERMINAL[style % len(TERMINAL)]}"
    return f"\x1b[{code}m{text}\x1b[0m"


def shows_colours() -> bool:
    """Whether text that is printed now may have colours: standard output is a terminal that knows
    them, and NO_COLOR is not set (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stdout, "isatty", lambda: False)())


def shows_blocks() -> bool:
    """Whether standard output can write characters such as a full block."""
    try:
        "█░▒├└─│·…×".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
