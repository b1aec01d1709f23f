"""How often this process has met an error, a lack of memory or an interrupt in the middle of what
ranks do together, which others may not have met.

Its headers and tags say so (``csrc/peer/header.h``, ``torch_dist/messages.py``): where two ranks
differ in it, they are at different steps of the program, and nothing that they send fits, however
alike it looks.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import _C  # pyright: ignore[reportAttributeAccessIssue]

# What torch, oneDNN and the standard library of C++ say.
_NO_MEMORY = (
    *("t allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc"),
    "can't start new thread",
)
_COUNTED = "_counted_as_a_lack"  # of an error
_COUNTS = "_counts_lacks"  # of a function

_MOVES = (
    *("all_reduce", "all_reduce_async", "all_gather", "all_to_all", "broadcast", "exchange"),
    *("send", "receive", "gather_objects", "gather_notes", "join", "reduce_scatter", "turn"),
    *("join_several", "reduce_scatter_several", "start_join_several"),
    *("start_reduce_scatter_several", "start_all_to_all", "all_reduce_with_notes"),
)

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


count_failures = _C.count_failures
_together = ""


def raised_together(text: str) -> str:
    """``text``, which all members of a group raise now."""
    global _together
    _together = text
    return text


def is_shared(error: BaseException) -> bool:
    """Whether all members of a group raise ``error``."""
    return bool(_together) and str(error) == _together  # a MemoryError has no text


def add(number: int = 1) -> None:
    """Count so many more."""
    _C.add_failures(number)


def forget() -> None:
    """Start counting from 0: the ranks of a new process group are at the same step."""
    add(-count_failures())


def is_lack(error: BaseException) -> bool:
    """Whether a process raised ``error`` for want of memory, which others may have, or while it
    handled such an error. Not where all members of a group raise it."""
    if is_shared(error):
        return False
    if error.__context__ is not None and is_lack(error.__context__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(
            words in str(error) for words in _NO_MEMORY
        )
    return isinstance(error, MemoryError)


def count_lack(error: BaseException) -> None:
    """Count ``error`` once if it is for want of memory, unless all members of a group raise it.

    It is called with whatever ends an op, a move or a compiled step. The rank may have been in the
    middle of what ranks do together, and if its program goes on it is at another step from then on.
    """
    if is_lack(error) and not getattr(error, _COUNTED, False):
        setattr(error, _COUNTED, True)
        add()


def counts_lacks(function: F) -> F:
    """``function``, in which ranks do something together; a lack of memory in it is counted."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            count_lack(error)
            raise

    setattr(counting, _COUNTS, True)
    return counting  # type: ignore[return-value]


def moves_count_lacks(transport: C) -> C:
    """A class decorator: the moves of a transport count lacks of memory, those that it has from a
    class whose moves do so already as they are."""
    for name in _MOVES:
        move = getattr(transport, name)
        if not hasattr(move, _COUNTS):
            setattr(transport, name, counts_lacks(move))
    return transport


def count_failure(error: Exception) -> None:
    """Count ``error``, unless all members of a group raise it."""
    if not is_shared(error) and not getattr(error, _COUNTED, False):
        add()
