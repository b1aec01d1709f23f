"""Run a function on several ranks: simulated in threads, or on a standing pool of gloo processes.

```
results = simulate(fn, 3, arg)        # fn(rank, arg) in three threads
results = pool(3).run(fn, arg)        # fn(rank, arg) in three processes, about 0.3 ms a call

@on_ranks(3, 4)                       # a test whose body runs on each of three, then four processes
def test_something(rank): ...
```

Both return the list of results in order of rank. `fn` takes the rank first. For the pool it must be
a top-level function of an importable module; arguments and results are pickled, tensors by value.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mirrored.transports.in_process import run_ranks

from .launch import forks

# CONSISTENT_TEST_ALL=1 also runs what repeats a proof with other numbers of ranks or dtypes.
ALL = os.environ.get("CONSISTENT_TEST_ALL") == "1"

# Three ranks hold uneven shards, four make a grid; two prove nothing that three do not.
SIZES = [2, 3, 4] if ALL else [3, 4]
ON_ONE_AXIS = [2, 3] if ALL else [3]


def in_turn(number: int) -> list[int]:
    """The numbers of ranks for one of many cases of a kind: three or four, in turn."""
    return SIZES if ALL else [SIZES[number % len(SIZES)]]


TIMEOUT = 60.0  # seconds that a call may take
GRACE = 3.0  # seconds that the other ranks get once one has failed
GLOO_TIMEOUT = 30.0  # seconds that a rank waits in a collective


class RankError(RuntimeError):
    """Ranks ended differently. The message shows the result, error or stack of each rank."""


# A plan is made for one rank: it knows its shard's sizes, and whether it is in a placement.
_plans: dict[tuple[int, int], Any] = {}


def simulate(fn: Callable[..., Any], n: int = 3, *args: Any, **kwargs: Any) -> list[Any]:
    """Run `fn(rank, *args, **kwargs)` on `n` simulated ranks. Re-raises the first error."""
    from consistent.dispatch._C import PlanTable
    from consistent.dispatch.plans.plan import use_plan_table
    from consistent.forms.random import generator

    drawn_from = generator.get_state()  # the ranks share torch's generators

    def main(rank: int) -> Any:
        plans = _plans.setdefault((n, rank), PlanTable())
        with use_plan_table(plans), generator.separate_state(drawn_from):
            return fn(rank, *args, **kwargs)

    return run_ranks(main, n)


def on_ranks(*counts: int, timeout: float = TIMEOUT) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function that runs on every rank of a pool, once for each of `counts`.

    The function takes the rank first; its other parameters are pytest's. Of ``(2, 3)`` and ``(2, 3,
    4)``, two are left to CONSISTENT_TEST_ALL=1.
    """
    if 3 in counts and not ALL:
        counts = tuple(count for count in counts if count != 2)

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def test(ranks: int, **given: Any) -> None:
            pool(ranks).run(test, timeout=timeout, **given)

        number = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        others = list(inspect.signature(body).parameters.values())[1:]
        others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
        test.__signature__ = inspect.Signature([number, *others])  # type: ignore[attr-defined]
        test.on_one_rank = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", counts)(test)

    return decorate


_pools: dict[int, Pool] = {}


def pool(n: int) -> Pool:
    """The standing pool of `n` gloo processes. They start with its first call."""
    return _pools.setdefault(n, Pool(n))


@atexit.register
def close_pools() -> None:
    """End all pools; a later call starts them again."""
    for each in _pools.values():
        each.close()


@dataclass(frozen=True)
class _Raised:
    error: BaseException
    text: str


@dataclass(frozen=True)
class _Stuck:
    text: str


class Pool:
    """Processes that live on between calls, joined in one gloo group over loopback."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._traces: list[Any] = []
        self._store: dist.TCPStore | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(rank, *args, **kwargs)` on every rank at once, each after `torch.manual_seed(0)`.

        If every rank raises the same type, rank 0's error is raised. If ranks end differently, or
        one is not done after `timeout` seconds, it raises RankError, and the next call starts fresh
        processes.
        """
        if not all(process.is_alive() for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        call = _dumps((_name_of(fn), args, kwargs))
        head = pickle.dumps(sys.path)
        for pipe in self._pipes:
            pipe.send_bytes(head)
            pipe.send_bytes(call)
        return self._judge(self._collect(timeout))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for file in [*self._pipes, *self._traces]:
            file.close()
        self._processes, self._pipes, self._traces, self._store = [], [], [], None

    def _start(self) -> None:
        context = forks()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.n):
            here, there = context.Pipe()
            trace = tempfile.NamedTemporaryFile(mode="w+")  # noqa: SIM115 - closed in close()
            process = context.Process(
                target=_worker,
                args=(rank, self.n, self._store.port, there, trace.name),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._traces.append(trace)
        ready = self._collect(TIMEOUT)
        if any(state is not None for state in ready):
            self._judge(ready)

    def _collect(self, timeout: float) -> list[Any]:
        """Every rank's result, `_Raised` or `_Stuck`."""
        deadline = time.monotonic() + timeout
        states: dict[int, Any] = {}
        while len(states) < self.n:
            open_pipes = {pipe: r for r, pipe in enumerate(self._pipes) if r not in states}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    states[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(1.0)
                    states[rank] = _Stuck(f"died, exit code {self._processes[rank].exitcode}")
                except Exception as error:
                    states[rank] = _Raised(error, f"its result cannot be unpickled: {error!r}")
                if isinstance(states[rank], _Raised | _Stuck):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in set(range(self.n)) - set(states):
            states[rank] = _Stuck(self._where(rank))
        return [states[rank] for rank in range(self.n)]

    def _where(self, rank: int) -> str:
        """The stack of a rank that does not return."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + 1.0
        while time.monotonic() < deadline and not text.endswith("\n"):
            time.sleep(0.1)
            self._traces[rank].seek(0)
            text = self._traces[rank].read()
        return "stuck in\n" + (text or "a call that lets no signal through")

    def _judge(self, states: list[Any]) -> list[Any]:
        bad = [state for state in states if isinstance(state, _Raised | _Stuck)]
        if not bad:
            return states
        report = "\n".join(f"--- rank {rank}: {_show(state)}" for rank, state in enumerate(states))
        raised = [state for state in states if isinstance(state, _Raised)]
        alike = len(raised) == self.n and len({type(state.error) for state in raised}) == 1
        text = str(raised[0].error).lower() if raised else ""
        if not alike or "gloo" in text or "stays broken" in text:
            self.close()
        if alike:
            raise raised[0].error from RankError(f"all {self.n} ranks raised\n{report}")
        raise RankError(f"{len(bad)} of {self.n} ranks failed\n{report}")


def _show(state: Any) -> str:
    if isinstance(state, _Raised | _Stuck):
        return state.text
    text = repr(state)
    return "returned " + (text if len(text) < 300 else text[:300] + " ...")


def _name_of(fn: Callable[..., Any]) -> tuple[str, str, str]:
    if "<" in fn.__qualname__:
        raise ValueError(
            f"pool.run: {fn.__qualname__} lives inside a function or is a lambda.\n"
            "  Another process finds a function by its module and name.\n"
            "  Move it to the top of its file and pass what it needs as arguments."
        )
    file = getattr(sys.modules.get(fn.__module__), "__file__", None) or ""
    return fn.__module__, fn.__qualname__, file


def _find(module: str, name: str, file: str) -> Callable[..., Any]:
    """The function of that name, loaded from its file if the module is no longer on the path."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None, f"no module {module}"
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "on_one_rank", found)


class _Pickler(pickle.Pickler):
    """Sends plain tensors as their bytes, which is ten times faster than torch.save."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().contiguous()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
        return _tensor, (data, obj.dtype, tuple(obj.shape), obj.requires_grad)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype).requires_grad_(grad)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).requires_grad_(grad)


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def _worker(rank: int, n: int, port: int, pipe: Connection, trace: str) -> None:
    # Its parent is the process that forks, which ends with the tests.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            return
    file = open(trace, "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=GLOO_TIMEOUT)
    )
    pipe.send_bytes(_dumps(None))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            head, call = pipe.recv_bytes(), pipe.recv_bytes()
            pipe.send_bytes(_answer(rank, head, call))
    os._exit(0)  # the parent is gone: exit without waiting for other ranks


def _answer(rank: int, head: bytes, call: bytes) -> bytes:
    try:
        sys.path[:] = pickle.loads(head)
        name, args, kwargs = pickle.loads(call)
        torch.manual_seed(0)
        return _dumps(_find(*name)(rank, *args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - raised again in the parent
        text = traceback.format_exc()
        try:
            sent = _dumps(_Raised(error, text))
            pickle.loads(sent)
            return sent
        except Exception:
            return _dumps(_Raised(RuntimeError(f"{type(error).__name__}: {error}"), text))
