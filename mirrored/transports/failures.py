"""How often this process has met an error or an interrupt in the middle of what ranks do together,
which others may not have met.

Its headers and tags say so (``csrc/peer/header.h``, ``torch_dist/messages.py``): where two ranks
differ in it, they are at different steps of the program, and nothing that they send fits, however
alike it looks.
"""

from __future__ import annotations

from . import _C  # pyright: ignore[reportAttributeAccessIssue]

count_failures = _C.count_failures
_together = ""


def raised_together(text: str) -> str:
    """``text``, which all members of a group raise now."""
    global _together
    _together = text
    return text


def is_shared(error: BaseException) -> bool:
    """Whether all members of a group raise ``error``."""
    return str(error) == _together


def add(number: int = 1) -> None:
    """Count so many more."""
    _C.add_failures(number)


def forget() -> None:
    """Start counting from 0: the ranks of a new process group are at the same step."""
    add(-count_failures())


def count_failure(error: Exception) -> None:
    """Count ``error``, unless all members of a group raise it."""
    if not is_shared(error):
        add()
