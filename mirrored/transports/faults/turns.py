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
from .place import place_of


class _Thread(threading.local):
    helps = False


_thread = _Thread()
_entering = threading.RLock()


class _Turns:
    """State of this process: which thread may communicate, and the calls that have not ended.

    Attributes:
        thread: the ident of the thread that may communicate; None if none has yet.
        its_object: the ``threading.Thread`` of that ident.
        said_so: the ident of the thread inside ``in_this_thread``, once for each nested block.
        messages: maps the ident of a thread to the call that it carries out by messages.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.its_object: threading.Thread | None = None  # idents of ended threads are reused
        self.said_so: list[int] = []  # idents in `in_this_thread`, nested; all of one thread
        self.messages: dict[int, object] = {}  # by thread


turns = _Turns()


def begin() -> None:
    """Make the calling thread the one that may communicate.

    It is called at the first use of a process group. Background threads of this library and
    programs inside ``in_this_thread`` change nothing.
    """
    # A background thread may be the first to use a group, but works for another thread.
    if not turns.said_so and not _thread.helps:
        turns.thread, turns.its_object = get_ident(), threading.current_thread()


def help_out() -> None:
    """Allow the calling thread to communicate beside the one thread that may.

    Background threads of this library call it when they start. They keep the order of calls the
    same on all ranks.
    """
    _thread.helps = True


def check() -> None:
    """Raise RuntimeError if this thread may not communicate now, or is in the middle of a call."""
    me = get_ident()
    if me == turns.thread and not turns.messages and not _C.is_in_call():
        return  # the fast path: every collective calls this
    # In the middle of a call by messages, or of one in shared memory.
    if me in turns.messages or _C.is_in_call():
        raise _in_the_middle(turns.messages.get(me))
    if me != turns.thread and not _thread.helps:
        _take_over(me)


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
    me = get_ident()
    with _entering:
        if turns.said_so and me not in turns.said_so:
            raise _two_threads(turns.said_so[-1])
        turns.said_so.append(me)
        before = turns.thread, turns.its_object
        turns.thread, turns.its_object = me, threading.current_thread()
    try:
        yield
    finally:
        with _entering:
            turns.said_so.remove(me)
            turns.thread, turns.its_object = before


def _take_over(me: int) -> None:
    """Let the calling thread, of ident ``me``, communicate if it may; else raise RuntimeError.

    If the thread that may communicate has ended, the calling thread takes its place. While that
    thread waits for a backward pass, autograd's threads may communicate for it.
    """
    with _entering:
        other, owner = turns.thread, turns.its_object
        if other is not None and owner is not None and owner.is_alive():
            if _is_of_backward(me, other):
                return
            raise _two_threads(other)
        turns.thread, turns.its_object = me, threading.current_thread()


def _is_of_backward(me: int, owner: int) -> bool:
    """Return whether the calling thread is autograd's, while ``owner`` waits for a backward pass.

    The autograd engine runs the part of each device in a thread of its own. ``me`` and ``owner``
    are the idents of the calling thread and of the one that may communicate.
    """
    # Autograd's threads are not started by Python: `threading` knows them as dummies, if at all.
    known = {thread.ident for thread in threading.enumerate() if type(thread) is not _DUMMY}
    waits = sys._current_frames().get(owner)
    return me not in known and waits is not None and waits.f_code.co_name == _RUNS_BACKWARD


_DUMMY = threading._DummyThread  # type: ignore[attr-defined]
_RUNS_BACKWARD = "_engine_run_backward"  # of torch.autograd.graph, its innermost Python frame


def _two_threads(other: int) -> RuntimeError:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return RuntimeError(
        f"thread {threading.current_thread().name!r} communicates, and on this rank thread "
        f"{names.get(other, other)!r} does.\n"
        f"    this thread: {place_of()}\n"
        f"    the other: {place_of(other)}\n"
        "  Ranks match their calls by order, and that of two threads differs by rank: they would "
        "take each other's values.\n"
        "  Communicate in one thread, and give the others plain tensors and numbers, as x.full() "
        "and x.item() return them.\n"
        "  Where that thread waits for this one, say so: with consistent.in_this_thread()."
    )


def _in_the_middle(call: object) -> RuntimeError:
    handler = handler_under_way()
    by = f"the handler of {handler} " if handler else "code that Python runs in between "
    return RuntimeError(
        f"{by}communicates while this rank is in the middle of "
        f"{call or 'a call in shared memory'}.\n"
        f"    {place_of()}\n"
        "  The other ranks are not there: they may have got no signal, or got it elsewhere.\n"
        "  Set a flag, and communicate between two steps. consistent.checkpoint.on_signal() makes "
        "one that all ranks see at the same step, and batches.stop_on() ends a loop so."
    )
