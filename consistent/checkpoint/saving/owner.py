"""Ownership of a folder or file: the first job that saves into it owns it as long as the job lives.

A mark is a file that names the owner:

```
run/.in-use      {"host": "a", "pid": 71, "since": "2026-11-25 01:02:03", ...}
                 touched every five seconds by rank 0 of the job that owns the folder
```

Two jobs in one folder would remove each other's checkpoints: because of ``keep``, and because each
takes the unfinished save of the other for that of a killed job. So the second job is refused. If
both are processes of one host, the system says whether the owner lives. Otherwise the owner counts
as dead if it does not touch its file for 20 seconds. This needs neither the clock of another host
nor the locks of a file system.

Whatever is found at the path of a mark is read as a mark; symbolic links are not followed. Only one
rank of a job owns anything.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from mirrored.readable import on_one_line

from ..agreement import CheckpointError

_HEARTBEAT_S = 5.0  # time between two touches of a mark by its owner
# An owner that has not touched its mark for so long counts as dead.
_SILENCE_LIMIT_S = 4 * _HEARTBEAT_S
_EXIT_GRACE_S = 2.0  # grace for an owner of this host that is about to end or to release
_POLL_S = 0.1
_TRIES = 50  # to claim a mark that other processes claim, too
_MAX_MARKS = 16  # marks that one process owns; a program may save into ever new folders


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder, as its mark file describes it.

    Args:
        host: the name of the process's host.
        pid: its process id.
        since: when it took the folder, for error messages.
        began: start time of the process as the system counts it; distinguishes processes, since a
            pid is used again.
        system: the boot of the host's system and its pid namespace; "" if unknown.
        token: random, different for each ownership.
    """

    host: str
    pid: int
    began: str
    system: str
    since: str
    token: str

    def __str__(self) -> str:
        return on_one_line(f"process {self.pid} on {self.host}, since {self.since}")


_owned_marks: dict[str, Owner] = {}  # mark -> what this process wrote into it
_kept_marks: set[str] = set()  # marks of folders that have a checkpoint of this job
_heartbeat_thread: threading.Thread | None = None


def claim(mark: str) -> None:
    """Become, or stay, the owner of the folder or file whose mark file is ``mark``.

    No other job saves there then. If the file names an owner on another host, this may wait for 20
    seconds to see whether that owner still lives.

    Raises:
        CheckpointError: another job owns it, and lives.
    """
    mark = _canonical_path(mark)
    for _ in range(_TRIES):
        if owns(mark) or _create_mark(mark):
            return
        mark_state = _read_mark(mark)
        if mark_state is not None and _is_owner_alive(mark, mark_state):
            raise CheckpointError(
                f"another job saves there: {mark_state[0] or 'unknown'}. Two jobs would remove or "
                "overwrite each other's files. Give each job a path of its own, or end that job "
                f"first; {mark} is its mark."
            )
        if mark_state is not None:
            _remove_dead_mark(mark, mark_state)
    raise CheckpointError(f"{mark} could not be written, as other jobs write it over and over.")


def check(mark: str) -> None:
    """Raise CheckpointError if this process no longer owns the folder of ``mark``.

    It is called before a checkpoint gets its final name. From then on ``release`` with
    ``unless_kept`` keeps the ownership, since the folder has a checkpoint of this job.
    """
    if owns(mark):
        _kept_marks.add(_canonical_path(mark))
        return
    mark_state = _read_mark(mark)
    raise CheckpointError(
        "another job has begun to save there while this one was stopped: "
        f"{mark_state and mark_state[0] or 'unknown'}. Give each job a path of its own."
    )


def release(mark: str, unless_kept: bool = False) -> None:
    """Give up the ownership of the folder whose mark file is ``mark``.

    With ``unless_kept`` the ownership stays if this job has completed a checkpoint there.
    """
    mark = _canonical_path(mark)
    if unless_kept and mark in _kept_marks:
        return
    if owns(mark):
        with suppress(OSError):
            os.remove(mark)
    _owned_marks.pop(mark, None)
    _kept_marks.discard(mark)


def owns(mark: str) -> bool:
    """Return whether this process owns the folder or file whose mark file is ``mark``."""
    mark = _canonical_path(mark)
    # Looked up once: another thread may release the folder at any time.
    expected = _owned_marks.get(mark)
    mark_state = expected and _read_mark(mark)
    return bool(mark_state) and mark_state[0] == expected


# -- the mark -------------------------------------------------------------------------------------


def _canonical_path(mark: str) -> str:
    # One folder has one key in ``_owned_marks``, by whatever path it is reached. The mark itself is
    # not resolved, so that a symbolic link in its place is not followed.
    folder, name = os.path.split(mark)
    return os.path.join(os.path.realpath(folder), name)


def _create_mark(mark: str) -> bool:
    """Write the mark of this process; return False if the file ``mark`` exists already."""
    owner = Owner(
        socket.gethostname(), os.getpid(), _start_time(os.getpid()), _system_id(),
        time.strftime("%Y-%m-%d %H:%M:%S"), uuid.uuid4().hex,
    )  # fmt: skip
    try:
        # O_EXCL: of several processes that try at the same time, one succeeds.
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(owner)))
    except OSError:
        os.remove(mark)
        raise
    _owned_marks[mark] = owner
    for old in list(_owned_marks)[:-_MAX_MARKS]:
        release(old)
    _start_heartbeat()
    return True


def _read_mark(mark: str) -> tuple[Owner | None, int] | None:
    """Return (owner, time of last modification) of a mark file; None if there is no file.

    The owner touches the file regularly, so the time shows whether it lives. The owner is None if
    the content is not that of a mark, or is still being written.
    """
    try:
        with _open_mark(mark) as file:
            touched, text = os.fstat(file.fileno()).st_mtime_ns, file.read(4096)
    except FileNotFoundError:
        return None
    try:
        fields: Any = json.loads(text)
        kinds = {"pid": int}
        if all(type(fields[key]) is kinds.get(key, str) for key in Owner.__annotations__):
            return Owner(**{key: fields[key] for key in Owner.__annotations__}), touched
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None, touched  # counts as an unknown owner, as long as it is touched


def _open_mark(mark: str) -> BinaryIO:
    """Open the mark file for reading.

    Raises OSError if it is not a plain file, because reading a pipe could block.
    """
    descriptor = os.open(mark, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{mark} is in the way: it is not a file. Remove it.")
    return os.fdopen(descriptor, "rb")


def _remove_dead_mark(mark: str, dead_state: tuple[Owner | None, int]) -> None:
    """Remove the mark of a dead owner, unless another job has written its own mark since.

    ``dead_state`` is what ``_read_mark`` returned for the dead owner's mark.
    """
    with _folder_lock(os.path.dirname(mark)):
        if _read_mark(mark) == dead_state:
            with suppress(FileNotFoundError):
                os.remove(mark)


@contextmanager
def _folder_lock(folder: str) -> Iterator[None]:
    """Context manager that only one process at a time enters for ``folder``, by a file lock.

    On a file system without locks several may enter. Then two jobs may claim the folder at once,
    and the one whose mark was replaced gets an error in ``check``.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- whether the owner lives ----------------------------------------------------------------------


def _is_owner_alive(mark: str, mark_state: tuple[Owner | None, int]) -> bool:
    owner = mark_state[0]
    if owner is not None and (owner.pid, owner.began, owner.system) == (
        os.getpid(), _start_time(os.getpid()), _system_id(),
    ):  # fmt: skip
        return False  # this process, which has no record of the mark any more
    is_local = owner is not None and owner.system != "" and owner.system == _system_id()
    # An owner on this host gets a short time to end or release. One on another host counts as
    # alive only if it touches the mark within the longer time.
    end = time.monotonic() + (_EXIT_GRACE_S if is_local else _SILENCE_LIMIT_S)
    while time.monotonic() < end:
        latest = _read_mark(mark)
        if latest is None or latest[0] != owner:
            return False  # it has left; the caller looks at the new owner, if there is one
        if is_local and owner is not None and _start_time(owner.pid) != owner.began:
            return False
        if not is_local and latest[1] != mark_state[1]:
            return True
        time.sleep(_POLL_S)
    return is_local


def _start_time(pid: int) -> str:
    """Return the start time of the process ``pid`` of this host; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        return "" if fields[0] in b"ZX" else fields[19].decode()
    except OSError:
        return ""


def _system_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_heartbeat() -> None:
    global _heartbeat_thread
    if _heartbeat_thread is None:
        _heartbeat_thread = threading.Thread(
            target=_touch_marks, name="consistent-folders", daemon=True
        )
        _heartbeat_thread.start()


def _touch_marks() -> None:
    while True:
        time.sleep(_HEARTBEAT_S)
        for mark in list(_owned_marks):
            with suppress(OSError):
                if owns(mark):
                    # Not if another job has taken the mark over: this would keep that job alive.
                    os.utime(mark)


@atexit.register
def _release_all() -> None:
    for mark in list(_owned_marks):
        release(mark)


def _forget_in_child() -> None:
    """Forget all ownership in a forked child, which is another process than the owner."""
    global _heartbeat_thread
    _owned_marks.clear()
    _kept_marks.clear()
    _heartbeat_thread = None


if hasattr(os, "register_at_fork"):  # systems without fork need none
    os.register_at_fork(after_in_child=_forget_in_child)
