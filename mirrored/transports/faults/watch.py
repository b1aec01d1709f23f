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
from .place import describe_place
from .turns import turns
from .wire import Address, ask, open_message_connection, own_host

ANSWER_S = 1.0  # seconds within which a rank answers if it can
_RETRY_PAUSE_S, _MAX_REFUSALS = 0.02, 25  # seconds between tries to connect; refusals to tolerate
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
        own_rank: this rank.
        alarm: the native flag that ends waits in shared memory and sockets. It is set once, with
            the text of the error that every rank raises.
        on_connection: called when another rank connects to this one: with that rank, and the file
            descriptor of the socket by which it will send its messages.
    """

    def __init__(
        self, own_rank: Rank, alarm: Any, on_connection: Callable[[int, int], None]
    ) -> None:
        self._own_rank, self.alarm = own_rank, alarm
        self.waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._message_waits: dict[int, tuple[float, WatchedCall]] = {}  # by thread
        self._give_up_lock = threading.RLock()  # held by the thread that gives up
        self._changed = threading.Condition()  # guards what follows
        self._lower_rank_gives_up = False
        self._notes_by_rank: dict[int, str] = {}  # notes that ranks left here when they ended
        self._listener = RequestListener(
            own_host(own_rank.store_host),
            self._answer_request,
            self._refresh_directory,
            on_connection,
        )
        self._directory = Directory(own_rank, self._listener.address)
        self._listener.start()
        atexit.register(self._close_at_exit)

    def close(self, note: str = notes.LEFT_GROUP) -> None:
        """Shut down, at the end of the process group or of the process.

        ``note`` says why this rank leaves. Another rank keeps it, for its error messages.
        """
        atexit.unregister(self._close_at_exit)
        notes.send_note(note, self._own_rank.rank, self._directory.known_addresses())
        self._listener.close()
        if (
            note == notes.LEFT_GROUP
        ):  # the process goes on, perhaps in another group over the same store
            self._directory.leave(ANSWER_S)
        self._directory.close()

    def _close_at_exit(self) -> None:
        self.close(notes.exit_note())

    def forget(self) -> None:
        """Close this object's copies of sockets in a forked child, which is not a rank itself."""
        atexit.unregister(self._close_at_exit)
        self._listener.forget()
        self._directory.close()

    # ---- sockets --------------------------------------------------------------------------------

    def join(self, rank: int, timeout_s: float) -> int:
        """Connect to ``rank``, and return the socket by which it receives this rank's messages.

        The result is a file descriptor that the caller owns. Raises RuntimeError if the rank has
        ended, or if there is no connection in time.
        """
        deadline, refusals, limit_s = time.monotonic() + timeout_s, 0, _CONNECT_S
        request = {"asks": "join", "rank": self._own_rank.rank}
        address = self._directory.known_addresses().get(rank)
        while time.monotonic() < deadline:
            self.check()
            previous_address = address
            if address is not None:
                try:
                    return open_message_connection(address, request, limit_s, deadline, self.check)
                except TimeoutError:  # a slow or blocked link
                    limit_s *= 2
                except OSError:
                    refusals += 1
            address = self._directory.refresh(ANSWER_S).get(rank)
            # Another address is that of another process, which has not refused yet.
            refusals = refusals if address == previous_address else 0
            if refusals > _MAX_REFUSALS:
                raise RuntimeError(f"Connection refused by peer (rank {rank})")
            time.sleep(_RETRY_PAUSE_S)
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

    def run_watched(self, call: WatchedCall, messages: Callable[[], T]) -> T:
        """Return the result of ``messages()``, which sends and waits for messages of ``call``.

        If it raises, for example after a timeout, all ranks raise one error.
        """
        thread, since = threading.get_ident(), time.monotonic()
        # Recorded before the check: a thread that gives up either finds this wait and wakes it, or
        # has set the alarm off before the check.
        self._message_waits[thread] = since, call
        turns.messages[thread] = call
        try:
            self.check()
            return messages()
        except (RuntimeError, KeyboardInterrupt) as error:
            try:
                words = self.give_up(self._wait_description(call, since, error))
            except KeyboardInterrupt:  # an interrupt during the wait may be raised only here
                self.give_up(self._wait_description(call, since, error))
                raise
            if isinstance(error, KeyboardInterrupt):
                raise
            raise RuntimeError(words) from error
        finally:
            self._message_waits.pop(thread)
            turns.messages.pop(thread)

    def _wait_description(self, call: WatchedCall, since: float, error: BaseException) -> str:
        waited = time.monotonic() - since
        return f"rank {self._own_rank.rank} has waited {waited:.1f} s in {call}{reason_of(error)}"

    def give_up(self, why: str) -> str:
        """Make every rank raise, because this one cannot go on; return the message they raise.

        ``why`` is the beginning of the message, unless another rank's message is used.
        """
        with self._give_up_lock:
            # If this process was suspended, another rank may have sent its words: wait for them.
            with self._changed:
                self._changed.wait_for(lambda: self.alarm.words is not None, 0.05)
            words = self.alarm.words or self._stop_all_ranks(why)
        return words

    def _stop_all_ranks(self, why: str) -> str:
        """Ask the other ranks where they are, and make all raise one message; return it.

        The message begins with ``why``, unless another rank's message is used.
        """
        own_status = self._own_status_line()
        addresses = self._directory.refresh(ANSWER_S, self.check)
        request = {"asks": "where", "rank": self._own_rank.rank}
        answers = ask(addresses, request, ANSWER_S, until=lambda: self.alarm.words is not None)
        received_words = self.alarm.words
        if received_words is not None:  # the rank that sent these words sends them to all ranks
            return received_words
        answers = {
            rank: answer if _is_answer_of_rank(answer) else None for rank, answer in answers.items()
        }
        # A rank that has given up before answers with its words, and all ranks must raise the same.
        known_words = next((a["words"] for a in answers.values() if a and "words" in a), None)
        words = known_words or self._error_message(why, own_status, addresses, answers)
        with self._changed:
            # Ranks that wait for each other give up together, and all raise the words of the lowest
            # rank: wait for these if a lower rank gives up too.
            if known_words is None and self._lower_rank_gives_up:
                self._changed.wait_for(lambda: self.alarm.words is not None, DEFER_S)
            self.alarm.set_off(words)
        self._send_stop(addresses, answers)
        return self.alarm.words

    def _send_stop(self, addresses: dict[int, Address], answers: _Answers) -> None:
        """Send the message that all ranks raise to the other ranks.

        Args:
            addresses: the addresses of the other ranks.
            answers: what each rank answered before. Ranks without an answer may be suspended
                processes; they are not waited for, and raise once they run again.
        """
        request = {"asks": "stop", "words": self.alarm.words}
        ask(
            {rank: addresses[rank] for rank, answer in answers.items() if answer}, request, ANSWER_S
        )
        # These did not answer before (they may be suspended): send the words, and do not wait for
        # an answer.
        ask(
            {rank: address for rank, address in addresses.items() if rank not in answers},
            request,
            0.05,
        )

    # ---- what is said ---------------------------------------------------------------------------

    def _error_message(
        self, why: str, own_status: str, addresses: dict[int, Address], answers: _Answers
    ) -> str:
        """Return the error message: ``why``, then a line for each rank that says where it is.

        ``own_status`` is this rank's line; ``addresses`` and ``answers`` are as in ``_send_stop``.
        """
        lines = []
        note_dicts = [
            self._notes_by_rank,
            *(dict(a.get("notes", [])) for a in answers.values() if a),
        ]
        notes_by_rank = {rank: note for note_dict in note_dicts for rank, note in note_dict.items()}
        for rank in range(self._own_rank.size):
            answer = answers.get(rank)
            if rank == self._own_rank.rank:
                status = own_status
            elif answer is not None:
                status = answer.get("line", "gives up too")
            else:
                status = self._absence_reason(
                    addresses.get(rank), rank in answers, notes_by_rank.get(rank)
                )
            lines.append(f"    rank {rank}: {status}\n")
        return (
            f"{why}, so every rank stops.\n"
            + "".join(lines)
            + "  Ranks must run the same ops in the same order, and all of them must stay.\n"
            "  Look at the lines above for a branch that only some ranks take; where a rank is "
            "only slow, give init_process_group a longer timeout.\n"
            "  The group stays broken: end its processes and start them again."
        )

    def _own_status_line(self) -> str:
        """Return where this rank is, and the call in which it has waited longest, for errors."""
        waits = [wait for waiter in list(self.waiters) for wait in waiter.waits()]
        now = time.monotonic()
        messages = list(self._message_waits.items())
        waits += [(now - since, thread, str(call)) for thread, (since, call) in messages]
        if not waits:
            return f"{describe_place(threading.main_thread().ident)}, waits for no rank"
        seconds, thread, call = max(waits)
        return f"{describe_place(thread)}, waits {seconds:.1f} s in {call}"

    def _absence_reason(self, address: Address | None, is_refused: bool, note: str | None) -> str:
        """Return the sentence of the error message about a rank that does not answer.

        Args:
            address: where the rank listens; None if it is not known.
            is_refused: whether no rank listens at that address.
            note: why the rank ended, if it left a note about that with another rank.
        """
        if address is None:
            return "has not communicated yet, so that it is not known where it is"
        process = f"process {address.pid}"
        if note is not None:
            return f"{process} {note}"
        is_local = address.host == self._listener.address.host
        state = address.state() if is_local else ""
        if not is_refused:
            why = "it is stopped, in a call that holds the interpreter, or out of reach"
            return f"{process} " + ("is stopped" if state == "T" else f"does not answer: {why}")
        if is_local and state:
            return f"{process} {notes.LEFT_GROUP}"
        return f"{process} has ended and left no word: it was killed or crashed"

    # ---- in the thread that answers -------------------------------------------------------------

    def _answer_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to another rank's request.

        A request asks to "stop" (raise its words), to "keep" the note of a rank that ends, or
        "where" this rank is.
        """
        if request["asks"] == "stop":
            self.stop(request["words"])
            return {}
        if request["asks"] == "keep":
            self._notes_by_rank[request["rank"]] = request["note"]
            return {}
        with self._changed:
            if self.alarm.words is not None:
                return {"words": self.alarm.words}
            # A rank asks where the others are only when it gives up.
            self._lower_rank_gives_up |= request["rank"] < self._own_rank.rank
        return {"line": self._own_status_line(), "notes": list(self._notes_by_rank.items())}

    def _refresh_directory(self) -> float | None:
        return self._directory.begin_refresh()


def _is_answer_of_rank(answer: dict[str, Any] | None) -> bool:
    """Return whether an answer came from a rank, and not from another program on its port."""
    return answer is not None and ("words" in answer or {"line", "notes"} <= answer.keys())


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error in brackets, such as `` (Connection reset)``.

    It is "" if the error only says that the time is up.
    """
    if isinstance(error, KeyboardInterrupt):
        return " (it was interrupted)"
    first_line = str(error).partition("\n")[0]
    sentence = re.sub(r"^\[[^\]]*\] *", "", first_line).partition(". ")[0]
    return "" if sentence.startswith("Timed out waiting") else f" ({sentence})"
