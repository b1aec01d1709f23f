"""Measured numbers, kept in a file that the processes of a user share.

Whoever needs a number that is not there measures it while it holds the file's lock, and appends it.
A process that waited for the lock finds the number in the file. So all processes of a host use the
same numbers, and never measure at the same time. A lock ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks here: processes that measure at the same time keep their own
    fcntl = None

Measure = Callable[[], float | None]


class Kept:
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
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._read_up_to)
            text = file.read()
            self._read_up_to += len(text)
            for line in text.decode(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # the half of a line of a killed process
                    name, value = json.loads(line)
                    self._known.setdefault(name, value)

    def _append(self, name: str, value: float | None) -> None:
        self._known[name] = value
        line = f"\n{json.dumps([name, value])}\n"
        with contextlib.suppress(OSError), self.path.open("ab") as file:
            file.write(line.encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        file = None
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_name(f"{self.path.name}.lock").open("w")
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if file is not None:
                file.close()


def folder() -> Path:
    """The folder of the library in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "consistent"
