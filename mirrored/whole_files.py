"""Files that are whole or not there: written under another name, synced, and renamed.

A disk may be full in the middle of a file, and a process may be killed there. Half a plan or half
a page could be taken for a whole one by whoever reads it next, and the file that was there before
would be lost.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_NEW = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)


def write(path: str | Path, data: bytes, *, own: bool = False) -> None:
    """Write a file at once: whoever reads meanwhile sees the old one or the new one.

    Args:
        own: as for ``being_written``.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    with being_written(path, own=own) as file:
        file.write(data)


@contextmanager
def being_written(path: str | Path, *, own: bool = False) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends; if the block raises, nothing is left of it.

    A link is followed, and what is not a file, such as ``/dev/stdout``, is written as it is.

    Args:
        own: it is the user's alone: whatever is in its place is replaced, and only the user may
            write it.
    """
    target = os.fspath(path) if own else os.path.realpath(path)
    if not own and os.path.exists(target) and not os.path.isfile(target):
        with open(target, "wb") as file:
            yield file
        return
    part = os.path.join(os.path.dirname(target), f".{uuid.uuid4().hex}.part")
    try:
        with os.fdopen(os.open(part, _NEW, 0o644 if own else 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not own and os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.remove(part)
        raise
