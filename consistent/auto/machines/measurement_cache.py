"""Cache of measured numbers in a file that all processes of a user share.

A process that needs a missing number measures it while it holds the file's lock, and appends it to
the file. A process that waited for the lock then finds the number there. So all processes of a host
use the same numbers, and never measure at the same time. A lock ends with the process that holds
it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mirrored.transports.tuning import own_files

try:
    import fcntl
except ImportError:  # no file locks here: processes that measure at once keep their own numbers
    fcntl = None

_LOCK_TIMEOUT_S = 120.0
_POLL_S = 0.02

Measure = Callable[[], float | None]


class MeasurementCache:
    """Cache of numbers by name, in the file at ``path``, with one line for each.

    The value None records that something cannot be measured. If the file cannot be written, numbers
    are kept in this process only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers: dict[str, float | None] = {}
        self._read_up_to = 0

    def get(self, name: str, measure: Measure) -> float | None:
        """Return the number ``name``; if it is missing, call ``measure`` and keep the result."""
        if name not in self._numbers:
            with self._file_lock():
                # Another process may have measured it while this one waited for the lock.
                self._read_new_lines()
                if name not in self._numbers:
                    self._append(name, measure())
        return self._numbers[name]

    def _read_new_lines(self) -> None:
        """Read the lines that were appended since the last read."""
        text = own_files.read(self.path) or b""
        for line in text[self._read_up_to :].decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # a killed process's cut-off line
                name, value = json.loads(line)
                if isinstance(name, str) and (value is None or _is_number(value)):
                    self._numbers.setdefault(name, value)
        self._read_up_to = len(text)

    def _append(self, name: str, value: float | None) -> None:
        self._numbers[name] = value
        with contextlib.suppress(OSError):
            # The newline in front ends a partial line that a killed process may have left.
            own_files.append(self.path, f"\n{json.dumps([name, value])}\n".encode())

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        file = None
        with contextlib.suppress(OSError):
            lock = self.path.with_name(f"{self.path.name}.lock")
            own_files.append(lock, b"")  # creates the file, owned by the user
            file = lock.open("ab")
            _lock(file)
        try:
            yield
        finally:
            if file is not None:
                file.close()


def _lock(file: IO[bytes]) -> None:
    """Wait for the exclusive lock on ``file``, for at most ``_LOCK_TIMEOUT_S`` seconds.

    If another process holds the lock for longer, as a stopped process does, this process goes on
    without the lock and measures for itself.
    """
    end = time.monotonic() + _LOCK_TIMEOUT_S
    while fcntl is not None and time.monotonic() < end:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def folder() -> Path:
    """Return the directory of this library in the user's cache directory."""
    return own_files.folder()
