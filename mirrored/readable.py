"""Text of others, such as names, paths and what an error says, in output of ours.

A name in a file that somebody made up may hold what a terminal obeys (``\\x1b[2J`` clears it), what
turns the order of letters around (U+202E), and what breaks a line where ours says something.
"""

from __future__ import annotations

import re

# Control characters but for a tab and the end of a line; what is not seen or changes the direction
# of writing; lone surrogates, which stand for bytes of a path that is not UTF-8.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def readable(text: str) -> str:
    """``text`` as any output takes it, with ``\\x1b`` for what would not be seen as a character."""
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def in_a_line(text: str) -> str:
    """The text in one line, with the ends of lines as ``\\n``."""
    return readable(text).replace("\n", "\\n")


def is_utf8(text: str) -> bool:
    """Whether a path is UTF-8: bytes that are not stand in it as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
