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

from mirrored.readable import in_a_line

from ..agreement import CheckpointError

_BEAT_S = 5.0  # time between two touches of a mark by its owner
_SILENT_S = 4 * _BEAT_S  # an owner that has not touched its mark for so long counts as dead
_LEAVING_S = 2.0  # grace for an owner of this host that is about to end or to release
_POLL_S = 0.1
_TRIES = 50  # to claim a mark that other processes claim, too
_MOST = 16  # marks that one process owns; a program may save into ever new folders


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
        return in_a_line(f"process {self.pid} on {self.host}, since {self.since}")


_own: dict[str, Owner] = {}  # mark -> what this process wrote into it
_kept: set[str] = set()  # marks of folders that have a checkpoint of this job
_beating: threading.Thread | None = None


def claim(mark: str) -> None:
    """Become, or stay, the owner of the folder or file whose mark file is ``mark``.

    No other job saves there then. If the file names an owner on another host, this may wait for 20
    seconds to see whether that owner still lives.

    Raises:
        CheckpointError: another job owns it, and lives.
    """
    mark = _real(mark)
    for _ in range(_TRIES):
        if owns(mark) or _create(mark):
            return
        held = _read(mark)
        if held is not None and _is_alive(mark, held):
            raise CheckpointError(
                f"another job saves there: {held[0] or 'unknown'}. Two jobs would remove or "
                "overwrite each other's files. Give each job a path of its own, or end that job "
                f"first; {mark} is its mark."
            )
        if held is not None:
            _take_away(mark, held)
    raise CheckpointError(f"{mark} could not be written, as other jobs write it over and over.")


def check(mark: str) -> None:
    """Raise CheckpointError if this process no longer owns the folder of ``mark``.

    It is called before a checkpoint gets its final name. From then on ``release`` with
    ``unless_kept`` keeps the ownership, since the folder has a checkpoint of this job.
    """
    if owns(mark):
        _kept.add(_real(mark))
        return
    held = _read(mark)
    raise CheckpointError(
        "another job has begun to save there while this one was stopped: "
        f"{held and held[0] or 'unknown'}. Give each job a path of its own."
    )


def release(mark: str, unless_kept: bool = False) -> None:
    """Give up the ownership of the folder whose mark file is ``mark``.

    With ``unless_kept`` the ownership stays if this job has completed a checkpoint there.
    """
    mark = _real(mark)
    if unless_kept and mark in _kept:
        return
    if owns(mark):
        with suppress(OSError):
            os.remove(mark)
    _own.pop(mark, None)
    _kept.discard(mark)


def owns(mark: str) -> bool:
    """Return whether this process owns the folder or file whose mark file is ``mark``."""
    mark = _real(mark)
    mine = _own.get(mark)  # looked up once: another thread may release the folder at any time
    held = mine and _read(mark)
    return bool(held) and held[0] == mine


# -- the mark -------------------------------------------------------------------------------------


def _real(mark: str) -> str:
    # One folder has one key in ``_own``, by whatever path it is reached. The mark itself is not
    # resolved, so that a symbolic link in its place is not followed.
    folder, name = os.path.split(mark)
    return os.path.join(os.path.realpath(folder), name)


def _create(mark: str) -> bool:
    """Write the mark of this process; return False if the file ``mark`` exists already."""
    me = Owner(
        socket.gethostname(), os.getpid(), _began(os.getpid()), _system(),
        time.strftime("%Y-%m-%d %H:%M:%S"), uuid.uuid4().hex,
    )  # fmt: skip
    try:
        # O_EXCL: of several processes that try at the same time, one succeeds.
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(me)))
    except OSError:
        os.remove(mark)
        raise
    _own[mark] = me
    for old in list(_own)[:-_MOST]:
        release(old)
    _begin_to_beat()
    return True


def _read(mark: str) -> tuple[Owner | None, int] | None:
    """Return (owner, time of last modification) of a mark file; None if there is no file.

    The owner touches the file regularly, so the time shows whether it lives. The owner is None if
    the content is not that of a mark, or is still being written.
    """
    try:
        with _opened(mark) as file:
            touched, text = os.fstat(file.fileno()).st_mtime_ns, file.read(4096)
    except FileNotFoundError:
        return None
    try:
        told: Any = json.loads(text)
        kinds = {"pid": int}
        if all(type(told[key]) is kinds.get(key, str) for key in Owner.__annotations__):
            return Owner(**{key: told[key] for key in Owner.__annotations__}), touched
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None, touched  # counts as an unknown owner, as long as it is touched


def _opened(mark: str) -> BinaryIO:
    """Open the mark file for reading.

    Raises OSError if it is not a plain file, because reading a pipe could block.
    """
    descriptor = os.open(mark, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{mark} is in the way: it is not a file. Remove it.")
    return os.fdopen(descriptor, "rb")


def _take_away(mark: str, dead: tuple[Owner | None, int]) -> None:
    """Remove the mark of a dead owner, unless another job has written its own mark since.

    ``dead`` is what ``_read`` returned for the dead owner's mark.
    """
    with _alone(os.path.dirname(mark)):
        if _read(mark) == dead:
            with suppress(FileNotFoundError):
                os.remove(mark)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
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


def _is_alive(mark: str, held: tuple[Owner | None, int]) -> bool:
    owner = held[0]
    if owner is not None and (owner.pid, owner.began, owner.system) == (
        os.getpid(), _began(os.getpid()), _system(),
    ):  # fmt: skip
        return False  # this process, which has no record of the mark any more
    known = owner is not None and owner.system != "" and owner.system == _system()
    # An owner on this host gets a short time to end or release. One on another host counts as
    # alive only if it touches the mark within the longer time.
    end = time.monotonic() + (_LEAVING_S if known else _SILENT_S)
    while time.monotonic() < end:
        now = _read(mark)
        if now is None or now[0] != owner:
            return False  # it has left; the caller looks at the new owner, if there is one
        if known and owner is not None and _began(owner.pid) != owner.began:
            return False
        if not known and now[1] != held[1]:
            return True
        time.sleep(_POLL_S)
    return known


def _began(pid: int) -> str:
    """Return the start time of the process ``pid`` of this host; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        return "" if fields[0] in b"ZX" else fields[19].decode()
    except OSError:
        return ""


def _system() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begin_to_beat() -> None:
    global _beating
    if _beating is None:
        _beating = threading.Thread(target=_beat, name="consistent-folders", daemon=True)
        _beating.start()


def _beat() -> None:
    while True:
        time.sleep(_BEAT_S)
        for mark in list(_own):
            with suppress(OSError):
                if owns(mark):
                    # Not if another job has taken the mark over: this would keep that job alive.
                    os.utime(mark)


@atexit.register
def _release_all() -> None:
    for mark in list(_own):
        release(mark)


def _in_child() -> None:
    """Forget all ownership in a forked child, which is another process than the owner."""
    global _beating
    _own.clear()
    _kept.clear()
    _beating = None


if hasattr(os, "register_at_fork"):  # systems without fork need none
    os.register_at_fork(after_in_child=_in_child)
