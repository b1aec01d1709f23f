"""Which job saves into a folder, or writes a file: the first one that does, as long as it lives.

```
run/.in-use      {"host": "a", "pid": 71, "since": "2026-11-25 01:02:03", ...}
                 touched every five seconds by rank 0 of the job that owns the folder
```

Two jobs in one folder would remove each other's checkpoints, by ``keep`` and as what a killed save
left, so the second is refused. Whether the first one lives is asked of the system where both are
processes of one host. Elsewhere it is dead if it does not touch its file for four beats: no clock
of another host is read, and no lock of a file system is relied on.

A mark that lies in the way, whatever it is, is read as one and never followed. Only one rank of a
job owns anything.
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

_BEAT_S = 5.0
_SILENT_S = 4 * _BEAT_S  # as long without a beat: the owner is dead
_LEAVING_S = 2.0  # an owner of this host, which may be about to end or to hand over
_POLL_S = 0.1
_TRIES = 50  # to become the owner where others try, too
_MOST = 16  # of a program that saves into ever new folders, this many are still its own


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder.

    Args:
        began: when its process began, in the system's own count: a pid is used again.
        system: the start of the host's system and the space of pids; "" if unknown.
        token: of this ownership alone.
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
    """Own what the file ``mark`` stands for, or go on owning it.

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
    """Raise CheckpointError if this process no longer owns it; otherwise keep it until the end."""
    if owns(mark):
        _kept.add(_real(mark))
        return
    held = _read(mark)
    raise CheckpointError(
        "another job has begun to save there while this one was stopped: "
        f"{held and held[0] or 'unknown'}. Give each job a path of its own."
    )


def release(mark: str, unless_kept: bool = False) -> None:
    """No longer own it; ``unless_kept``: but if this job has a checkpoint there."""
    mark = _real(mark)
    if unless_kept and mark in _kept:
        return
    if owns(mark):
        with suppress(OSError):
            os.remove(mark)
    _own.pop(mark, None)
    _kept.discard(mark)


def owns(mark: str) -> bool:
    """Whether this process owns it."""
    mark = _real(mark)
    held = _own.get(mark) and _read(mark)
    return bool(held) and held[0] == _own[mark]


# -- the mark -------------------------------------------------------------------------------------


def _real(mark: str) -> str:
    folder, name = os.path.split(mark)
    return os.path.join(os.path.realpath(folder), name)


def _create(mark: str) -> bool:
    """Write this process's mark; False if there is one."""
    me = Owner(
        socket.gethostname(), os.getpid(), _began(os.getpid()), _system(),
        time.strftime("%Y-%m-%d %H:%M:%S"), uuid.uuid4().hex,
    )  # fmt: skip
    try:
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
    """(the owner, when it last touched its mark); None instead of an owner whose mark is being
    written, or is none; None if there is no mark."""
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
    return None, touched


def _opened(mark: str) -> BinaryIO:
    """A mark that is a plain file; opening a pipe would wait for whoever writes into it."""
    descriptor = os.open(mark, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{mark} is in the way: it is not a file. Remove it.")
    return os.fdopen(descriptor, "rb")


def _take_away(mark: str, dead: tuple[Owner | None, int]) -> None:
    """Remove the mark of an owner that is dead, and not one that was written since."""
    with _alone(os.path.dirname(mark)):
        if _read(mark) == dead:
            with suppress(FileNotFoundError):
                os.remove(mark)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """No other process is inside at the same time, where the file system has locks. Where it has
    none, one that loses its mark so learns it by ``check``."""
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
        return False  # this very process, which has forgotten it
    known = owner is not None and owner.system != "" and owner.system == _system()
    end = time.monotonic() + (_LEAVING_S if known else _SILENT_S)
    while time.monotonic() < end:
        now = _read(mark)
        if now is None or now[0] != owner:
            return False  # it has left; whoever came since is asked
        if known and owner is not None and _began(owner.pid) != owner.began:
            return False
        if not known and now[1] != held[1]:
            return True
        time.sleep(_POLL_S)
    return known


def _began(pid: int) -> str:
    """When a process of this host began; "" if it has ended."""
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
                    os.utime(mark)


@atexit.register
def _release_all() -> None:
    for mark in list(_own):
        release(mark)


def _in_child() -> None:
    """A forked child is another process, and owns nothing."""
    global _beating
    _own.clear()
    _kept.clear()
    _beating = None


if hasattr(os, "register_at_fork"):  # systems without fork need none
    os.register_at_fork(after_in_child=_in_child)
