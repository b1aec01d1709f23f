"""Makes all ranks raise one error if a rank waits in vain.

The rank that waits asks all others where they are, and sends them the error's message.

```
rank 0   waits for rank 1 ....... time is up:  asks 1 and 2    words: where 0, 1 and 2 are   raises
rank 1   elsewhere                             answers         is sent the words             raises
rank 2       waits for rank 0 ...............  answers         is sent the words             raises
```

In this file "words" is the text of that error. In the drawing rank 1 raises the error when it
communicates next, and rank 2 at once. If several ranks give up together, all raise the words of the
lowest rank. While all is well, the thread that answers sleeps and nothing is recorded.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from . import notes
from .directory import Directory, Rank
from .listener import RequestListener
from .place import place_of
from .turns import turns
from .wire import Address, ask, joined, own_host

ANSWER_S = 1.0  # seconds within which a rank answers if it can
_PAUSE_S, _REFUSALS = 0.02, 25  # seconds between tries to connect; refusals to tolerate
_CONNECT_S = 1.0  # limit of the first try to connect to a rank; doubled after each timeout
DEFER_S = 2.5  # how long to wait for the words of a lower rank that gives up too

Wait = tuple[float, int, str]  # seconds waited so far, ident of the thread, text of the call
_Answers = dict[int, dict[str, Any] | None]  # by rank; None if it does not listen


T = TypeVar("T")


class WatchedCall(NamedTuple):
    """Description of a communication call, for the error message of a rank that waits in vain.

    It has the call's name, the dtype and shape of what is sent, and its ranks. As text it is, for
    example, ``all_reduce of float32[4] over ranks (0, 1)``.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} of {dtype}{list(self.shape)} over ranks {self.ranks}"


class Waiter(Protocol):
    """Protocol of a transport that can list its calls that wait for other ranks.

    If another rank waits in vain, its error message says in which of these calls this rank waits.
    """

    def waits(self) -> list[Wait]: ...


class Watch:
    """Makes all ranks raise if one waits in vain, and tells ranks that ask where this one is.

    There is one for each default process group.

    Args:
        me: this rank.
        alarm: the native flag that ends waits in shared memory and sockets. It is set once, with
            the text of the error that every rank raises.
        joined: called when another rank connects to this one: with that rank, and the file
            descriptor of the socket by which it will send its messages.
    """

    def __init__(self, me: Rank, alarm: Any, joined: Callable[[int, int], None]) -> None:
        self._me, self.alarm = me, alarm
        self.waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._messages: dict[int, tuple[float, WatchedCall]] = {}  # waits for messages, by thread
        self._deciding = threading.RLock()  # held by the thread that gives up
        self._changed = threading.Condition()  # guards what follows
        self._lower_gives_up = False
        self._notes: dict[int, str] = {}  # notes that ranks left here when they ended
        self._listener = RequestListener(own_host(me.store_host), self._answer, self._look, joined)
        self._directory = Directory(me, self._listener.address)
        self._listener.start()
        atexit.register(self._end)

    def close(self, note: str = notes.LEFT) -> None:
        """Shut down, at the end of the process group or of the process.

        ``note`` says why this rank leaves. Another rank keeps it, for its error messages.
        """
        atexit.unregister(self._end)
        notes.leave(note, self._me.rank, self._directory.known())
        self._listener.close()
        if note == notes.LEFT:  # the process goes on, perhaps in another group over the same store
            self._directory.leave(ANSWER_S)
        self._directory.close()

    def _end(self) -> None:
        self.close(notes.at_the_end())

    def forget(self) -> None:
        """Close this object's copies of sockets in a forked child, which is not a rank itself."""
        atexit.unregister(self._end)
        self._listener.forget()
        self._directory.close()

    # ---- sockets --------------------------------------------------------------------------------

    def join(self, rank: int, timeout_s: float) -> int:
        """Connect to ``rank``, and return the socket by which it receives this rank's messages.

        The result is a file descriptor that the caller owns. Raises RuntimeError if the rank has
        ended, or if there is no connection in time.
        """
        deadline, refused, limit_s = time.monotonic() + timeout_s, 0, _CONNECT_S
        request = {"asks": "join", "rank": self._me.rank}
        address = self._directory.known().get(rank)
        while time.monotonic() < deadline:
            self.check()
            before = address
            if address is not None:
                try:
                    return joined(address, request, limit_s, deadline, self.check)
                except TimeoutError:  # a slow or blocked link
                    limit_s *= 2
                except OSError:
                    refused += 1
            address = self._directory.find(ANSWER_S).get(rank)
            # Another address is that of another process, which has not refused yet.
            refused = refused if address == before else 0
            if refused > _REFUSALS:
                raise RuntimeError(f"Connection refused by peer (rank {rank})")
            time.sleep(_PAUSE_S)
        raise RuntimeError("Timed out waiting")

    # ---- waits ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error of all ranks if any rank has given up; calls begin with this."""
        if self.alarm.words is not None:
            raise RuntimeError(self.alarm.words)

    def stop(self, words: str) -> None:
        """Make this rank raise ``words``: at once if it waits, else when it next communicates."""
        with self._changed:
            self.alarm.set_off(words)
            self._changed.notify_all()

    def carry_out(self, call: WatchedCall, messages: Callable[[], T]) -> T:
        """Return the result of ``messages()``, which sends and waits for messages of ``call``.

        If it raises, for example after a timeout, all ranks raise one error.
        """
        thread, since = threading.get_ident(), time.monotonic()
        # Recorded before the check: a thread that gives up either finds this wait and wakes it, or
        # has set the alarm off before the check.
        self._messages[thread] = since, call
        turns.messages[thread] = call
        try:
            self.check()
            return messages()
        except (RuntimeError, KeyboardInterrupt) as error:
            try:
                words = self.give_up(self._why(call, since, error))
            except KeyboardInterrupt:  # an interrupt during the wait may be raised only here
                self.give_up(self._why(call, since, error))
                raise
            if isinstance(error, KeyboardInterrupt):
                raise
            raise RuntimeError(words) from error
        finally:
            self._messages.pop(thread)
            turns.messages.pop(thread)

    def _why(self, call: WatchedCall, since: float, error: BaseException) -> str:
        waited = time.monotonic() - since
        return f"rank {self._me.rank} has waited {waited:.1f} s in {call}{reason_of(error)}"

    def give_up(self, why: str) -> str:
        """Make every rank raise, because this one cannot go on; return the message they raise.

        ``why`` is the beginning of the message, unless another rank's message is used.
        """
        with self._deciding:
            # If this process was suspended, another rank may have sent its words: wait for them.
            with self._changed:
                self._changed.wait_for(lambda: self.alarm.words is not None, 0.05)
            words = self.alarm.words or self._speak(why)
        return words

    def _speak(self, why: str) -> str:
        """Ask the other ranks where they are, and make all raise one message; return it.

        The message begins with ``why``, unless another rank's message is used.
        """
        own = self._own_line()
        others = self._directory.find(ANSWER_S, self.check)
        request = {"asks": "where", "rank": self._me.rank}
        answers = ask(others, request, ANSWER_S, until=lambda: self.alarm.words is not None)
        told = self.alarm.words
        if told is not None:  # the rank that sent these words sends them to all ranks
            return told
        answers = {rank: said if _is_ranks(said) else None for rank, said in answers.items()}
        # A rank that has given up before answers with its words, and all ranks must raise the same.
        known = next((a["words"] for a in answers.values() if a and "words" in a), None)
        words = known or self._composed(why, own, others, answers)
        with self._changed:
            # Ranks that wait for each other give up together, and all raise the words of the lowest
            # rank: wait for these if a lower rank gives up too.
            if known is None and self._lower_gives_up:
                self._changed.wait_for(lambda: self.alarm.words is not None, DEFER_S)
            self.alarm.set_off(words)
        self._tell(others, answers)
        return self.alarm.words

    def _tell(self, others: dict[int, Address], answers: _Answers) -> None:
        """Send the message that all ranks raise to the other ranks.

        Args:
            others: the addresses of the other ranks.
            answers: what each rank answered before. Ranks without an answer may be suspended
                processes; they are not waited for, and raise once they run again.
        """
        request = {"asks": "stop", "words": self.alarm.words}
        ask({rank: others[rank] for rank, said in answers.items() if said}, request, ANSWER_S)
        # These did not answer before (they may be suspended): send the words, and do not wait for
        # an answer.
        ask({rank: a for rank, a in others.items() if rank not in answers}, request, 0.05)

    # ---- what is said ---------------------------------------------------------------------------

    def _composed(self, why: str, own: str, others: dict[int, Address], answers: _Answers) -> str:
        """Return the error message: ``why``, then a line for each rank that says where it is.

        ``own`` is this rank's line; ``others`` and ``answers`` are as in ``_tell``.
        """
        lines = []
        kept = [self._notes, *(dict(a.get("notes", [])) for a in answers.values() if a)]
        left = {rank: note for some in kept for rank, note in some.items()}
        for rank in range(self._me.size):
            answer = answers.get(rank)
            if rank == self._me.rank:
                said = own
            elif answer is not None:
                said = answer.get("line", "gives up too")
            else:
                said = self._absent(others.get(rank), rank in answers, left.get(rank))
            lines.append(f"    rank {rank}: {said}\n")
        return (
            f"{why}, so every rank stops.\n"
            + "".join(lines)
            + "  Ranks must run the same ops in the same order, and all of them must stay.\n"
            "  Look at the lines above for a branch that only some ranks take; where a rank is "
            "only slow, give init_process_group a longer timeout.\n"
            "  The group stays broken: end its processes and start them again."
        )

    def _own_line(self) -> str:
        """Return where this rank is, and the call in which it has waited longest, for errors."""
        waits = [wait for waiter in list(self.waiters) for wait in waiter.waits()]
        now = time.monotonic()
        messages = list(self._messages.items())
        waits += [(now - since, thread, str(call)) for thread, (since, call) in messages]
        if not waits:
            return f"{place_of(threading.main_thread().ident)}, waits for no rank"
        seconds, thread, call = max(waits)
        return f"{place_of(thread)}, waits {seconds:.1f} s in {call}"

    def _absent(self, address: Address | None, refused: bool, note: str | None) -> str:
        """Return the sentence of the error message about a rank that does not answer.

        Args:
            address: where the rank listens; None if it is not known.
            refused: whether no rank listens at that address.
            note: why the rank ended, if it left a note about that with another rank.
        """
        if address is None:
            return "has not communicated yet, so that it is not known where it is"
        process = f"process {address.pid}"
        if note is not None:
            return f"{process} {note}"
        local = address.host == self._listener.address.host
        state = address.state() if local else ""
        if not refused:
            why = "it is stopped, in a call that holds the interpreter, or out of reach"
            return f"{process} " + ("is stopped" if state == "T" else f"does not answer: {why}")
        if local and state:
            return f"{process} {notes.LEFT}"
        return f"{process} has ended and left no word: it was killed or crashed"

    # ---- in the thread that answers -------------------------------------------------------------

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to another rank's request.

        A request asks to "stop" (raise its words), to "keep" the note of a rank that ends, or
        "where" this rank is.
        """
        if request["asks"] == "stop":
            self.stop(request["words"])
            return {}
        if request["asks"] == "keep":
            self._notes[request["rank"]] = request["note"]
            return {}
        with self._changed:
            if self.alarm.words is not None:
                return {"words": self.alarm.words}
            # A rank asks where the others are only when it gives up.
            self._lower_gives_up |= request["rank"] < self._me.rank
        return {"line": self._own_line(), "notes": list(self._notes.items())}

    def _look(self) -> float | None:
        return self._directory.look()


def _is_ranks(said: dict[str, Any] | None) -> bool:
    """Return whether an answer came from a rank, and not from another program on its port."""
    return said is not None and ("words" in said or {"line", "notes"} <= said.keys())


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error in brackets, such as `` (Connection reset)``.

    It is "" if the error only says that the time is up.
    """
    if isinstance(error, KeyboardInterrupt):
        return " (it was interrupted)"
    first = str(error).partition("\n")[0]
    said = re.sub(r"^\[[^\]]*\] *", "", first).partition(". ")[0]
    return "" if said.startswith("Timed out waiting") else f" ({said})"
