"""Atomic file writes: a file is written under another name, synced, and renamed.

A disk may fill up, or a process may be killed, in the middle of a write. Without this, a later
reader could take half a file for a complete one, and the old file would be lost.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_CREATE_FLAGS = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)


def write(path: str | Path, data: bytes, *, own: bool = False) -> None:
    """Write a file atomically: a concurrent reader sees the old content or the new one.

    Args:
        path: the file.
        data: its whole content.
        own: whether only the user may write the file, as in ``replace_atomically``.

    Raises:
        OSError: the file cannot be written; its old content is still there.
    """
    with replace_atomically(path, own=own) as file:
        file.write(data)


@contextmanager
def replace_atomically(path: str | Path, *, own: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces ``path`` atomically when the block ends.

    If the block raises, the file is removed and ``path`` stays as it was. A symbolic link is
    followed, and a target that is not a regular file, such as ``/dev/stdout``, is written directly.

    Args:
        path: the name of the file.
        own: whether only the user may write the file. If so, anything in its place, such as a link,
            is replaced.
    """
    target = os.fspath(path) if own else os.path.realpath(path)
    if not own and os.path.exists(target) and not os.path.isfile(target):
        with open(target, "wb") as file:
            yield file
        return
    # In the folder of the target: a rename is atomic within one file system only.
    part = os.path.join(os.path.dirname(target), f".{uuid.uuid4().hex}.part")
    try:
        with os.fdopen(os.open(part, _CREATE_FLAGS, 0o644 if own else 0o666), "wb") as file:
            yield file
            file.flush()
            # Before the rename: after a crash the name might otherwise refer to an empty file.
            os.fsync(file.fileno())
        if not own and os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.remove(part)
        raise
