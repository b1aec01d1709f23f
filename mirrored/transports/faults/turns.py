"""Ensures that one thread of a rank communicates, and makes one call at a time.

Ranks match their calls by order. Two threads, or a signal handler that runs in the middle of a
call, would make calls in another order on each rank, and ranks would receive each other's values.
So a second thread is refused, and so is a call in the middle of another one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from .. import _C  # pyright: ignore[reportAttributeAccessIssue]
from .handlers import handler_under_way
from .place import describe_place


class _ThreadState(threading.local):
    is_helper = False


_thread = _ThreadState()
_owner_lock = threading.RLock()


class _TurnState:
    """State of this process: which thread may communicate, and the calls that have not ended.

    Attributes:
        thread: the ident of the thread that may communicate; None if none has yet.
        thread_object: the ``threading.Thread`` of that ident.
        exclusive_idents: the ident of the thread inside ``in_this_thread``, once for each nested
            block.
        messages: maps the ident of a thread to the call that it carries out by messages.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.thread_object: threading.Thread | None = None  # idents of ended threads are reused
        self.exclusive_idents: list[int] = []  # in `in_this_thread`, nested; all of one thread
        self.messages: dict[int, object] = {}  # by thread


turns = _TurnState()


def claim_main_thread() -> None:
    """Make the calling thread the one that may communicate.

    It is called at the first use of a process group. Background threads of this library and
    programs inside ``in_this_thread`` change nothing.
    """
    # A background thread may be the first to use a group, but works for another thread.
    if not turns.exclusive_idents and not _thread.is_helper:
        turns.thread, turns.thread_object = get_ident(), threading.current_thread()


def allow_this_thread() -> None:
    """Allow the calling thread to communicate in addition to the one thread that may.

    Background threads of this library call it when they start. They keep the order of calls the
    same on all ranks.
    """
    _thread.is_helper = True


def check() -> None:
    """Raise RuntimeError if this thread may not communicate now, or is in the middle of a call."""
    ident = get_ident()
    if ident == turns.thread and not turns.messages and not _C.is_in_call():
        return  # the fast path: every collective calls this
    # In the middle of a call by messages, or of one in shared memory.
    if ident in turns.messages or _C.is_in_call():
        raise _reentry_error(turns.messages.get(ident))
    if ident != turns.thread and not _thread.is_helper:
        _take_ownership(ident)


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Let only the calling thread of this rank communicate inside the ``with`` block.

    Without it, only the first thread that used the process group may communicate, or, once that
    thread has ended, the next one that does. Use this block in another thread if the first one
    waits for it meanwhile, on every rank in the same order:

    ```
    def answer(prompt):                 # called in a thread of a server's pool
        with consistent.in_this_thread():
            return model.generate(prompt)
    ```

    Raises:
        RuntimeError: another thread is inside such a block.
    """
    ident = get_ident()
    with _owner_lock:
        if turns.exclusive_idents and ident not in turns.exclusive_idents:
            raise _two_threads_error(turns.exclusive_idents[-1])
        turns.exclusive_idents.append(ident)
        before = turns.thread, turns.thread_object
        turns.thread, turns.thread_object = ident, threading.current_thread()
    try:
        yield
    finally:
        with _owner_lock:
            turns.exclusive_idents.remove(ident)
            turns.thread, turns.thread_object = before


def _take_ownership(ident: int) -> None:
    """Let the calling thread, of ident ``ident``, communicate if it may; else raise RuntimeError.

    If the thread that may communicate has ended, the calling thread takes its place. While that
    thread waits for a backward pass, autograd's threads may communicate for it.
    """
    with _owner_lock:
        owner_ident, owner_thread = turns.thread, turns.thread_object
        if owner_ident is not None and owner_thread is not None and owner_thread.is_alive():
            if _is_backward_thread(ident, owner_ident):
                return
            raise _two_threads_error(owner_ident)
        turns.thread, turns.thread_object = ident, threading.current_thread()


def _is_backward_thread(ident: int, owner: int) -> bool:
    """Return whether the calling thread is autograd's, while ``owner`` waits for a backward pass.

    The autograd engine runs the part of each device in a thread of its own. ``ident`` and ``owner``
    are the idents of the calling thread and of the one that may communicate.
    """
    # Autograd's threads are not started by Python: `threading` knows them as dummies, if at all.
    python_idents = {
        thread.ident for thread in threading.enumerate() if type(thread) is not _DUMMY_THREAD
    }
    frame = sys._current_frames().get(owner)
    return (
        ident not in python_idents
        and frame is not None
        and frame.f_code.co_name == _BACKWARD_FUNCTION
    )


_DUMMY_THREAD = threading._DummyThread  # type: ignore[attr-defined]
_BACKWARD_FUNCTION = "_engine_run_backward"  # of torch.autograd.graph, its innermost Python frame


def _two_threads_error(other_ident: int) -> RuntimeError:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return RuntimeError(
        f"thread {threading.current_thread().name!r} communicates, and on this rank thread "
        f"{names.get(other_ident, other_ident)!r} does.\n"
        f"    this thread: {describe_place()}\n"
        f"    the other: {describe_place(other_ident)}\n"
        "  Ranks match their calls by order, and that of two threads differs by rank: they would "
        "take each other's values.\n"
        "  Communicate in one thread, and give the others plain tensors and numbers, as x.full() "
        "and x.item() return them.\n"
        "  Where that thread waits for this one, say so: with consistent.in_this_thread()."
    )


def _reentry_error(call: object) -> RuntimeError:
    handler = handler_under_way()
    caller = f"the handler of {handler} " if handler else "code that Python runs in between "
    return RuntimeError(
        f"{caller}communicates while this rank is in the middle of "
        f"{call or 'a call in shared memory'}.\n"
        f"    {describe_place()}\n"
        "  The other ranks are not there: they may have got no signal, or got it elsewhere.\n"
        "  Set a flag, and communicate between two steps. consistent.checkpoint.on_signal() makes "
        "one that all ranks see at the same step, and batches.stop_on() ends a loop so."
    )
