"""Measured numbers, kept in a file that the processes of a user share.

Whoever needs a number that is not there measures it while it holds the file's lock, and appends it.
A process that waited for the lock finds the number in the file. So all processes of a host use the
same numbers, and never measure at the same time. A lock ends with the process that holds it.
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
except ImportError:  # no such locks here: processes that measure at the same time keep their own
    fcntl = None

_LONGEST_S = 120.0
_POLL_S = 0.02

Measure = Callable[[], float | None]


class MeasurementCache:
    """Numbers by name, in the file at `path`, one line for each. None stands for what cannot be
    measured, and is kept as well. If the file cannot be written, numbers live with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, float | None] = {}
        self._read_up_to = 0

    def get(self, name: str, measure: Measure) -> float | None:
        """The number of that name; `measure` gives it if it has not been kept."""
        if name not in self._known:
            with self._locked():
                self._read()
                if name not in self._known:
                    self._append(name, measure())
        return self._known[name]

    def _read(self) -> None:
        """Take in what was appended since the last time."""
        text = own_files.read(self.path) or b""
        for line in text[self._read_up_to :].decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # half a line of a killed process
                name, value = json.loads(line)
                if isinstance(name, str) and (value is None or _is_number(value)):
                    self._known.setdefault(name, value)
        self._read_up_to = len(text)

    def _append(self, name: str, value: float | None) -> None:
        self._known[name] = value
        with contextlib.suppress(OSError):
            own_files.append(self.path, f"\n{json.dumps([name, value])}\n".encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        file = None
        with contextlib.suppress(OSError):
            lock = self.path.with_name(f"{self.path.name}.lock")
            own_files.append(lock, b"")  # it is there now, and the user's own
            file = lock.open("ab")
            _lock(file)
        try:
            yield
        finally:
            if file is not None:
                file.close()


def _lock(file: IO[bytes]) -> None:
    """Wait for the lock, and no longer than measuring takes: one that is held for ever, as by a
    process that was stopped, costs each process its own measurement."""
    end = time.monotonic() + _LONGEST_S
    while fcntl is not None and time.monotonic() < end:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def folder() -> Path:
    """The folder of the library in the user's cache."""
    return own_files.folder()
