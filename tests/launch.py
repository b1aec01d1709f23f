"""Run a program on several ranks as torchrun does, in processes forked from one that has imported
torch already: a start takes 0.1 s instead of 5.

```
done = launch("examples/data_parallel.py", "--steps", "3", ranks=2)
done.status, done.printed[0], done.errors[1]        # by rank
```

Also the context of the pools' processes in `tests/ranks.py`. Some tests of the examples use
torchrun itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "torch", "torch.distributed", "consistent", "mirrored", "tests.launch",
    # What torch imports when an op is first run on meta tensors, 2 s in every process.
    "torch.fx.experimental.symbolic_shapes", "torch._dynamo.utils",
    "tests.frozen",
]  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """How a launch ended: 0, or the status of the first rank that failed, and what ranks wrote."""

    status: int
    printed: list[str]
    errors: list[str]


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
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            given = dict(environment or {}) | (of_rank(rank, ranks, port) if ranks > 1 else {})
            files = (f"{folder}/{rank}.out", f"{folder}/{rank}.err")
            run = (str(Path(program).resolve()), args, os.environ | given, files)
            processes.append(forks().Process(target=_be_rank, args=run))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        written = [
            [Path(f"{folder}/{rank}.{kind}").read_text() for rank in range(ranks)]
            for kind in ("out", "err")
        ]
    failed = [process.exitcode for process in processes if process.exitcode]
    return Launched(failed[0] if failed else 0, *written)


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
    """What a new interpreter would do with the program, from its arguments to its end."""
    for number, name in enumerate(files, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
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
