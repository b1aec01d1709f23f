"""Runs a program under the launcher, arms places, and reads what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from mirrored.transports.faults.wire import state_and_start
from tests.launch import launch

ROOT = Path(__file__).parents[3]
_started: list[Run] = []
PROGRAM = Path(__file__).with_name("program.py")


class Run:
    """One launch of ``program.py``, or of another program that takes the folder first; ``inside``
    is a command that runs it. Its ranks are forks of the launcher unless it is said otherwise.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *options: str,
        launcher: tuple[str, ...] = (),
        program: tuple[str, ...] = (str(PROGRAM),),
        inside: tuple[str, ...] = (),
        forked: bool = True,
    ):
        self.folder, self.text = folder, ""
        folder.mkdir(exist_ok=True)
        started = ["-m", "tests.forked_ranks", "consistent"] if forked else ["-m", "consistent"]
        command = [*inside, sys.executable, *started, "run", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, *launcher, *program, str(folder), *options], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        _started.append(self)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += f"{time.time():.3f} {line}"

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks that run."""
        return children(self.process.pid)

    @property
    def progress(self) -> list[tuple[int, int, float, float]]:
        """(step, ranks, time, loss) of each step that was finished."""
        path = self.folder / "progress"
        if not path.exists():
            return []
        rows = [
            line.split() for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
        ]
        return [(int(a), int(b), float(c), float(d)) for a, b, c, d in rows]

    def arm(self, place: str, by: str = "SIGKILL", process: int | None = None) -> None:
        """The next rank that comes to the place, or the given process when it does, gets the
        signal."""
        place = place if process is None else f"{place}.{process}"
        before = self.folder / f".{place}"
        before.write_text(by)
        before.rename(self.folder / place)

    def wait_until(self, ready, limit: float = 120.0) -> None:
        """Raises AssertionError, with what was printed, if it does not come true; then all is ended
        before."""
        end = time.monotonic() + limit
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(self.text)
            time.sleep(0.01)

    def wait_until_gone(self, processes: Iterable[int], limit: float = 5.0) -> None:
        """Raises AssertionError if one of the processes still runs after ``limit`` seconds."""
        left, end = list(processes), time.monotonic() + limit
        while left := [pid for pid in left if state_and_start(pid)[0] not in ("", "Z")]:
            assert time.monotonic() < end, f"processes {left} run on"
            time.sleep(0.01)

    def is_taken(self, place: str) -> bool:
        """Whether a rank has come there, since it was armed."""
        return not (self.folder / place).exists() and not any(self.folder.glob(f"{place}.*"))

    def stop(self) -> None:
        """The training comes to its end after this step."""
        (self.folder / "stop").touch()

    def end(self, limit: float = 120.0) -> int:
        """The exit status, once it has ended.

        Raises:
            AssertionError: with what was printed, if it has not ended after ``limit`` seconds.
        """
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended after {limit} s:\n{self.text}") from None
        finally:
            self.kill()
            self._reading.join(5.0)

    def kill(self) -> None:
        """End whatever still runs."""
        for pid in self.ranks if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):  # one that ends meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.kill()

    def losses(self) -> list[list[float]]:
        """Of each process that came to the end."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("losses.*"))]


def children(process: int) -> list[int]:
    """Process ids of the processes that one has started, and which have not been waited for."""
    with contextlib.suppress(OSError):  # it ends meanwhile
        threads = Path(f"/proc/{process}/task").iterdir()
        return [int(pid) for t in threads for pid in (t / "children").read_text().split()]
    return []


def end_all() -> None:
    """End what a test has started and not ended, as one that failed."""
    while _started:
        _started.pop().kill()


def undisturbed(folder: Path, *options: str, program: Path = PROGRAM) -> list[float]:
    """The losses of one process."""
    folder.mkdir(exist_ok=True)
    done = launch(program, str(folder), *options, ranks=1)
    assert done.status == 0, done.errors
    return json.loads(next(folder.glob("losses.*")).read_text())
