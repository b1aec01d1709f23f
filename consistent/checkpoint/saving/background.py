"""Saving in the background: a thread of each rank writes its part, and uses no collectives.

```
main thread    copy aside | train ...................................... | next call: how did it go?
thread, rank 0             | write | wait for the others' notes | index, rename
thread, rank 1             | write | note
```

The notes go through the store by which the ranks found each other, so the threads' messages never
come between the collectives of the training. The threads touch plain copies of tensors only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mirrored.readable import escape_invisible
from mirrored.transports.default import current
from mirrored.transports.faults.store import LimitedStore
from mirrored.transports.torch_dist.groups import world

from . import folders
from .folders import UnfinishedCheckpoint
from .job import Part, SaveJob, complete, write_part

T = TypeVar("T")

_POLL_S = 0.02
_LAST_WAIT_S = 60.0  # how long a process that is about to end waits for notes of other ranks


class Notes:
    """Channel by which each rank reports to rank 0 what it has written of a save, or how it failed.

    A note is such a message. Notes go through the process group's store, so that the threads that
    send them take part in no collective.
    """

    def __init__(self, checkpoint: UnfinishedCheckpoint) -> None:
        self._ranks = current().size
        self._store: LimitedStore | None = None
        self.is_given_up = False
        if self._ranks > 1:
            name = f"consistent/checkpoint/{escape_invisible(checkpoint.path)}/{checkpoint.serial}"
            store = world().store
            assert store is not None
            self._store = store.with_prefix(name)

    def send(self, rank: int, note: Part) -> None:
        """Send ``note``, that of this ``rank``, to rank 0."""
        if self._store is not None:
            self._ask_store(lambda store: store.set(str(rank), json.dumps(note)))

    def receive_all(self, own_note: Part) -> list[Part]:
        """Wait for the notes of all ranks, and return them in order of rank. Rank 0 calls this.

        ``own_note`` is rank 0's own note. Raises if ``is_given_up`` is set meanwhile, or if notes
        are missing a minute after the program has ended.
        """
        names = [str(rank) for rank in range(1, self._ranks)]
        if not names:
            return [own_note]
        ending: float | None = None
        while not self._ask_store(lambda store: store.check(names)):
            if self.is_given_up:
                raise RuntimeError("a rank that was to write a part of it is gone")
            # The program is over, and other ranks may have ended without a note: limit the wait.
            if ending is None and not threading.main_thread().is_alive():
                ending = time.monotonic()
            if ending is not None and time.monotonic() - ending > _LAST_WAIT_S:
                raise TimeoutError(
                    "the program is over, and some ranks have not said that they wrote their part"
                )
            time.sleep(_POLL_S)
        return [
            own_note,
            *self._ask_store(lambda store: [_pop_note(store, name) for name in names]),
        ]

    def _ask_store(self, call: Callable[[Any], T]) -> T:
        assert self._store is not None
        return self._store.ask(call)


def _pop_note(store: Any, name: str) -> Part:
    text = store.get(name)
    store.delete_key(name)
    return json.loads(text)


class BackgroundSave:
    """A save whose files a thread of this rank writes while the program goes on.

    The threads of all ranks report to rank 0 what they have written, and rank 0's thread completes
    the checkpoint. If this rank fails before it can write, its thread reports that error, so that
    no rank waits for its part in vain.
    """

    def __init__(self, checkpoint: UnfinishedCheckpoint) -> None:
        self.path = checkpoint.path
        self._checkpoint, self._rank = checkpoint, current().rank
        self._notes = Notes(checkpoint)
        self._job: SaveJob | None = None
        self._error: Exception | None = None
        self.written = threading.Event()
        # Not a daemon: a program that ends waits for it, so that the last save is not lost.
        self._thread = threading.Thread(target=self._run, name="consistent-checkpoint")

    def start(self, prepare: Callable[[], SaveJob]) -> None:
        """Call ``prepare``, which returns what this rank writes, and start the thread.

        An ``Exception`` of ``prepare`` is not raised here, but by ``own_part``.
        """
        try:
            self._job = prepare()
        except Exception as error:
            self._error = error
        except BaseException as error:  # such as Ctrl-C
            if current().size > 1:  # other ranks have not seen it: all raise in the next call
                self._error = RuntimeError(f"{type(error).__name__} while it was copied")
            raise
        finally:
            self._start_thread()

    def _start_thread(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            # The system gives no thread. The other ranks' threads need none of their main threads,
            # so waiting for them here is safe.
            self._run()

    def _run(self) -> None:
        try:
            own_note = self._write_own_part()
            self.written.set()
            if self._rank:
                self._notes.send(self._rank, own_note)
                return
            parts = self._notes.receive_all(own_note)
            if self._job is None or any("error" in part for part in parts):
                folders.give_up(self._checkpoint)
            else:
                complete(self._job, parts)
        except Exception as error:
            self._error = self._error or error
            if not self._rank:
                folders.give_up(self._checkpoint)
        finally:
            self.written.set()  # also after an error, or own_part would wait forever

    def _write_own_part(self) -> Part:
        """Write this rank's part of the checkpoint; return the note for rank 0.

        The note describes what was written, or is ``{"error": text}``.
        """
        try:
            if self._job is None:
                return {"error": str(self._error)}
            return write_part(self._job)
        except Exception as error:
            self._error = error
            return {"error": str(error)}

    def own_part(self) -> None:
        """Wait until this rank has written its part, and raise if it could not copy or write it."""
        self.written.wait()
        if self._error is not None:
            raise self._error

    def outcome(self) -> None:
        """Wait until this rank's thread has ended, and raise its error if it failed.

        On rank 0 the thread ends when the whole checkpoint is complete, or has failed.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until this rank's thread has ended."""
        if self._thread.ident is not None:  # else it could not be started
            self._thread.join()

    def give_up(self) -> None:
        """Stop waiting for notes of other ranks, and wait until this rank's thread has ended.

        It is called when ranks are lost. The checkpoint is removed if notes are missing.
        """
        self._notes.is_given_up = True
        self.join()
