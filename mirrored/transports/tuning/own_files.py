"""Files that a user's processes keep in the user's cache: read and written if they are the user's.

A cache may lie in a folder that others write in (``XDG_CACHE_HOME=/tmp``). What another user put
there is neither read nor written through: not a file, nor a link, nor a pipe that would be waited
for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ... import whole_files

_OTHERS_WRITE = 0o002
_MOST_BYTES = 4 << 20


def folder() -> Path:
    """The library's folder in the user's cache; a path that cannot exist if there is none."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root if os.path.isabs(root) else os.devnull) / "consistent"


def may_keep(path: Path) -> bool:
    """Whether the folder of a file is there, or can be made, and is the user's own."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return _is_own(os.stat(path.parent)) and os.access(path.parent, os.W_OK)
    return False


def is_own_folder(path: Path) -> bool:
    """Whether there is a folder of the user's at a path, in which no other user writes, and in
    whose place none can put another one."""
    with contextlib.suppress(OSError):
        link, found, above = os.lstat(path), os.stat(path), os.stat(path.parent)
        replaceable = above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX
        is_mine = link.st_uid in (os.geteuid(), 0) and _is_own(found)
        return is_mine and stat.S_ISDIR(found.st_mode) and not replaceable
    return False


def in_the_way(path: Path) -> Path | None:
    """What of another user's keeps a file from being used: its folder, or what is in its place."""
    with contextlib.suppress(OSError):
        if not _is_own(os.stat(path.parent)):
            return path.parent
        if not _is_own(os.lstat(path)):
            return path
    return None


def read(path: Path) -> bytes | None:
    """What a file of the user's holds; None if there is none, or another one in its place."""
    with contextlib.suppress(OSError):
        if not _is_own(os.stat(path.parent)):
            return None
        with os.fdopen(os.open(path, _FLAGS | os.O_RDONLY), "rb") as file:
            found = os.fstat(file.fileno())
            if _is_own(found) and stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES:
                return file.read()
    return None


def write(path: Path, text: bytes) -> None:
    """Write a file at once: whoever reads meanwhile sees the old one or the new one.

    Raises:
        OSError: it cannot be written, or the folder is another user's.
    """
    if not may_keep(path):
        raise PermissionError(f"{path.parent} is not this user's to write in")
    whole_files.write(path, text, own=True)


def append(path: Path, text: bytes) -> None:
    """Append to a file of the user's, or begin it.

    Raises:
        OSError: it cannot be written, or is another user's.
    """
    if not may_keep(path):
        raise PermissionError(f"{path.parent} is not this user's to write in")
    flags = _FLAGS | os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with os.fdopen(os.open(path, flags, 0o644), "ab") as file:
        found = os.fstat(file.fileno())
        if not (_is_own(found) and stat.S_ISREG(found.st_mode)):
            raise PermissionError(f"{path} is not this user's")
        file.write(text)


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE


_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
