"""Counts the failures of this process in operations that ranks do together.

A failure is an error, an out-of-memory error or an interrupt in the middle of such an operation,
which other ranks may not have met. Headers and tags of messages contain the count
(``csrc/peer/header.h``, ``torch_dist/messages.py``): if two ranks differ in it, they are at
different steps of the program, so none of their messages match, even if they look the same.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import _C  # pyright: ignore[reportAttributeAccessIssue]

# Texts of out-of-memory errors of torch, oneDNN and the C++ standard library.
_OUT_OF_MEMORY_TEXTS = (
    *("t allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc"),
    "can't start new thread",
)
_COUNTED_ATTRIBUTE = "_counted_as_a_lack"  # attribute of an error that has been counted
_COUNTS_ATTRIBUTE = "_counts_lacks"  # attribute of a function that counts already

_COMMUNICATION_METHODS = (
    *("all_reduce", "all_reduce_async", "all_gather", "all_to_all", "broadcast", "exchange"),
    *("send", "receive", "gather_objects", "gather_notes"),
    *("all_gather_into_tensor", "reduce_scatter", "all_to_all_single"),
    *("all_gather_several", "reduce_scatter_several", "start_all_gather_several"),
    *("start_reduce_scatter_several", "start_all_to_all", "all_reduce_with_notes"),
)

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


count_failures = _C.count_failures
_last_shared_text = ""


def raised_together(text: str) -> str:
    """Record that all members of a group now raise an error with ``text``; return ``text``.

    Such an error is not counted as a failure of this rank, because all ranks of the group are
    still at the same step of the program.
    """
    global _last_shared_text
    _last_shared_text = text
    return text


def is_shared(error: BaseException) -> bool:
    """Return whether ``error`` is the last one that all members of a group raised together.

    It is compared by its text with that of the last ``raised_together``.
    """
    return bool(_last_shared_text) and str(error) == _last_shared_text  # a MemoryError has no text


def add_failures(number: int = 1) -> None:
    """Add ``number`` to this process's count of failures, which its messages contain."""
    _C.add_failures(number)


def reset_failures() -> None:
    """Reset this process's count of failures to 0.

    It is called when a new process group begins, whose ranks are all at the same step.
    """
    add_failures(-count_failures())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error that other ranks may not have.

    An error that was raised while such an error was handled counts too. An error that all members
    of a group raise together does not.
    """
    if is_shared(error):
        return False
    if error.__context__ is not None and is_out_of_memory(error.__context__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(
            words in str(error) for words in _OUT_OF_MEMORY_TEXTS
        )
    return isinstance(error, MemoryError)


def count_out_of_memory(error: BaseException) -> None:
    """Count ``error`` once if it is an out-of-memory error of this rank alone.

    It is called with every error that ends an op, a collective or a compiled step. The rank may
    have been in the middle of an operation of several ranks, and if its program continues it is at
    another step from then on.
    """
    if is_out_of_memory(error) and not getattr(error, _COUNTED_ATTRIBUTE, False):
        # The same error passes through several decorated functions on its way up.
        setattr(error, _COUNTED_ATTRIBUTE, True)
        add_failures()


def counts_out_of_memory(function: F) -> F:
    """Decorator of a collective operation: an out-of-memory error in it is counted as a failure.

    The error is raised as usual.
    """

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            count_out_of_memory(error)
            raise

    setattr(counting, _COUNTS_ATTRIBUTE, True)
    return counting  # type: ignore[return-value]


def methods_count_out_of_memory(transport: C) -> C:
    """Class decorator of a transport: ``counts_out_of_memory`` for its communication methods.

    Methods inherited from a class that is decorated already are left as they are.
    """
    for name in _COMMUNICATION_METHODS:
        method = getattr(transport, name)
        if not hasattr(method, _COUNTS_ATTRIBUTE):
            setattr(transport, name, counts_out_of_memory(method))
    return transport


def count_failure(error: Exception) -> None:
    """Add 1 to the count of failures for ``error``, which has ended an operation of several ranks.

    Nothing is added if ``error`` was counted before, or if all members of its group raise it.
    """
    if not is_shared(error) and not getattr(error, _COUNTED_ATTRIBUTE, False):
        add_failures()
