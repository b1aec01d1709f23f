"""Makes text from outside (names, paths, error messages) safe to print.

A file name that somebody made up may contain control sequences of a terminal (``\\x1b[2J`` clears
it), characters that reverse the order of letters (U+202E), and line breaks that make part of the
name look like a line of our output.
"""

from __future__ import annotations

import re

# Control characters except tab and newline; invisible characters and those that change the
# direction of writing; lone surrogates, which stand for bytes of a path that is not UTF-8.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def escape_invisible(text: str) -> str:
    """Return ``text`` with escapes such as ``\\x1b`` in place of invisible characters.

    Any output stream can encode the result.
    """
    return _INVISIBLE.sub(lambda match: repr(match[0])[1:-1], text)


def on_one_line(text: str) -> str:
    """Return ``text`` as one line, with newlines as ``\\n``."""
    return escape_invisible(text).replace("\n", "\\n")


def is_utf8(text: str) -> bool:
    """Return whether a path, as Python decoded it, was valid UTF-8.

    Python represents bytes of a path that are not UTF-8 as lone surrogates.
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
