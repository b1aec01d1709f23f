"""Files in the user's cache folder, read and written only if they are the user's own.

The cache may be in a folder that others can write to (``XDG_CACHE_HOME=/tmp``). Anything that
another user put there is ignored: a file, a link that would be written through, and a pipe on which
a read would block.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ... import whole_files

_OTHERS_MAY_WRITE = 0o002
_MAX_BYTES = 4 << 20


def folder() -> Path:
    """Return the library's folder in the user's cache, such as ``~/.cache/consistent``.

    If the cache has no absolute path, it is a path below ``/dev/null``, where no file can exist.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root if os.path.isabs(root) else os.devnull) / "consistent"


def can_write(path: Path) -> bool:
    """Return whether the file ``path`` may be stored in its folder.

    The folder must be the user's own and writable; it is made if it does not exist.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return _is_own(os.stat(path.parent)) and os.access(path.parent, os.W_OK)
    return False


def is_own_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder of the user's that no other user can change.

    It is not if others may write in it, or may rename it because they may write in its parent.
    """
    with contextlib.suppress(OSError):
        link, status, parent_status = os.lstat(path), os.stat(path), os.stat(path.parent)
        # In a folder that others may write in, only its sticky bit keeps them from renaming this
        # one.
        replaceable = (
            parent_status.st_mode & _OTHERS_MAY_WRITE and not parent_status.st_mode & stat.S_ISVTX
        )
        is_mine = link.st_uid in (os.geteuid(), 0) and _is_own(status)
        return is_mine and stat.S_ISDIR(status.st_mode) and not replaceable
    return False


def foreign_path(path: Path) -> Path | None:
    """Return the folder or file of another user that prevents the use of ``path``; None if none."""
    with contextlib.suppress(OSError):
        if not _is_own(os.stat(path.parent)):
            return path.parent
        if not _is_own(os.lstat(path)):
            return path
    return None


def read(path: Path) -> bytes | None:
    """Return the content of a file that the user owns; None if it cannot be used.

    It is None if there is no such file, if it or its folder is another user's, or if it is longer
    than ``_MAX_BYTES``.
    """
    with contextlib.suppress(OSError):
        if not _is_own(os.stat(path.parent)):
            return None
        with os.fdopen(os.open(path, _OPEN_FLAGS | os.O_RDONLY), "rb") as file:
            # Of the open file: checked by its path, it could be replaced before it is opened.
            status = os.fstat(file.fileno())
            if _is_own(status) and stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES:
                return file.read()
    return None


def write(path: Path, text: bytes) -> None:
    """Write a file atomically: a concurrent reader sees the old content or the new one.

    Raises:
        OSError: the file cannot be written, or the folder is another user's.
    """
    if not can_write(path):
        raise PermissionError(f"{path.parent} is not this user's to write in")
    whole_files.write(path, text, own=True)


def append(path: Path, text: bytes) -> None:
    """Append to a file of the user's, or create it.

    Raises:
        OSError: the file cannot be written, or is another user's.
    """
    if not can_write(path):
        raise PermissionError(f"{path.parent} is not this user's to write in")
    flags = _OPEN_FLAGS | os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with os.fdopen(os.open(path, flags, 0o644), "ab") as file:
        status = os.fstat(file.fileno())
        if not (_is_own(status) and stat.S_ISREG(status.st_mode)):
            raise PermissionError(f"{path} is not this user's")
        file.write(text)


def _is_own(status: os.stat_result) -> bool:
    # Root's files count as the user's own: root could change any file anyway.
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_MAY_WRITE


# O_NONBLOCK: opening a pipe without another end would block.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
