"""Run a program on several ranks as torchrun does, in processes forked from one that has imported
torch already: a start takes 0.1 s instead of 5.

```
done = launch("examples/data_parallel.py", "--steps", "3", ranks=2)
done.status, done.printed[0], done.errors[1]        # by rank

started = Started("examples/data_parallel.py")      # one process, which goes on meanwhile
started.status, started.printed
```

Also the context of the pools' processes in `tests/ranks.py`. Some tests of the examples use
torchrun itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "torch", "torch.distributed", "consistent", "mirrored", "tests.launch",
    # What torch imports when an op is first run on meta tensors, 2 s in every process.
    "torch.fx.experimental.symbolic_shapes", "torch._dynamo.utils",
    # What programs and tests of several ranks use, 0.4 s in each of them.
    "consistent.checkpoint", "consistent.elastic", "consistent.auto", "hypothesis", "tests.ranks",
    "torch.distributed.pipelining.schedules",
    "tests.frozen",
]  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """How a launch ended: 0, or the status of the first rank that failed, and what ranks wrote."""

    status: int
    printed: list[str]
    errors: list[str]


class Started:
    """A program under way, as python would run it with ``args``."""

    def __init__(
        self, program: Path | str, *args: str, environment: Mapping[str, str] | None = None
    ) -> None:
        folder = tempfile.mkdtemp(prefix="consistent-launch-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._written = [Path(folder, kind) for kind in ("out", "err")]
        for path in self._written:
            path.touch()
        files = tuple(map(str, self._written))
        run = (str(Path(program).resolve()), args, os.environ | dict(environment or {}), files)
        self._process = forks().Process(target=_be_rank, args=run)
        self._process.start()

    @property
    def status(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def printed(self) -> str:
        """What it has written by now to its standard output."""
        return self._written[0].read_text()

    @property
    def errors(self) -> str:
        """What it has written by now to its standard error."""
        return self._written[1].read_text()

    def wait(self, limit: float) -> None:
        """Until it has ended, or so many seconds."""
        self._process.join(limit)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.join()


def import_too(module: str) -> None:
    """Let the process that is forked import a module before, if it is there."""
    if module not in IMPORTED:
        IMPORTED.insert(IMPORTED.index("tests.frozen"), module)


def forks() -> ForkServerContext:
    """Starts processes as forks of one that has torch imported, and no thread."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def launch(
    program: Path | str,
    *args: str,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Launched:
    """Run ``program`` with ``args`` on ``ranks`` ranks; those still there after ``timeout`` seconds
    are killed. One rank gets no environment of a launcher, as if python had started it."""
    port = free_port()
    started = [
        Started(program, *args, environment=dict(environment or {}) | given)
        for given in (of_rank(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks))
    ]
    deadline = time.monotonic() + timeout
    for each in started:
        each.wait(max(0.0, deadline - time.monotonic()))
        each.kill()
    failed = [each.status for each in started if each.status]
    printed, errors = [each.printed for each in started], [each.errors for each in started]
    return Launched(failed[0] if failed else 0, printed, errors)


def of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _be_rank(
    program: str, args: tuple[str, ...], environment: dict[str, str], files: tuple[str, str]
) -> None:
    """Run the program, which writes to these files."""
    for number, name in enumerate(files, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    be_program(program, args, environment)


def be_program(program: str, args: tuple[str, ...], environment: dict[str, str]) -> NoReturn:
    """Do what a new interpreter would do with the program, from its arguments to its end."""
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [program, *args]
    sys.path.insert(0, str(Path(program).parent))
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        status = _status_of(ended.code)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        traceback.print_exc()
        status = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
