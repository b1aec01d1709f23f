"""Worlds of ranks for programs that end badly, made by forks of a process that has all imported.

```
found = run([World("kill_9", 3, hosts=1), ...])     # several at a time, a few seconds each
found[0][2].words                                   # what rank 2 of the first world raised
```

Run as a program, this file is that process. It takes worlds, and prints what their ranks did.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from tests.faults import linked
from tests.faults.link import Fate, Link, through_links
from tests.faults.programs import PROGRAMS
from tests.faults.setting import Setting, T
from tests.launch import launch

AT_ONCE = 6
LIMIT_S = 15.0 + 3 * T  # a world takes a few seconds; a rank that is left after so many is killed


@dataclass(frozen=True)
class World:
    """A program on so many ranks; on two hosts the last rank is alone on the second, and `link`
    says what happens to the link between them (`link.Fate`), after how many bytes."""

    program: str
    ranks: int
    hosts: int
    link: str = ""
    after: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one rank did; `raised` is the name of the error, "" for none."""

    raised: str = ""
    words: str = ""
    again: str = ""  # what it raised when it communicated once more
    seconds: float = 0.0
    value: str = ""
    status: int | None = None  # of its process, minus the signal that ended it


def run(worlds: list[World]) -> list[list[Outcome]]:
    """What each rank of each world did."""
    asked = json.dumps([asdict(world) for world in worlds])
    settings = {"GLOO_SOCKET_IFNAME": "lo", "FAULTS_T": str(T)}
    done = launch(__file__, asked, ranks=1, environment=settings, timeout=LIMIT_S * len(worlds))
    assert done.status == 0, done.errors[0][-3000:]
    return [[Outcome(**each) for each in found] for found in json.loads(done.printed[0])]


# ---- in the process that forks ------------------------------------------------------------------


class Running:
    """A world under way."""

    def __init__(self, index: int, world: World) -> None:
        self.index, self.world = index, world
        self.folder = tempfile.mkdtemp(prefix="consistent-faults-")
        self.deadline = time.monotonic() + LIMIT_S
        self.pids: list[int] = []
        self.pipes: list[IO[bytes]] = []
        self.status: dict[int, int] = {}

    def start(self) -> None:
        """Fork the ranks."""
        for rank in range(self.world.ranks):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                be_rank(self.world, rank, self.folder, writer)
            os.close(writer)
            self.pids.append(pid)
            self.pipes.append(open(reader, "rb"))

    def look(self) -> bool:
        """Whether all ranks have ended. One that stopped itself goes on when the others have."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.status:
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.status[rank] = os.waitstatus_to_exitcode(code)
        left = [pid for rank, pid in enumerate(self.pids) if rank not in self.status]
        late = time.monotonic() > self.deadline
        if len(left) == 1 or late:
            for pid in left:
                os.kill(pid, signal.SIGKILL if late else signal.SIGCONT)
        return not left

    def outcomes(self) -> list[dict[str, Any]]:
        found = []
        for rank, pipe in enumerate(self.pipes):
            with pipe:
                text = pipe.read()
            found.append((json.loads(text) if text else {}) | {"status": self.status[rank]})
        shutil.rmtree(self.folder)
        return found


def be_rank(world: World, rank: int, folder: str, writer: int) -> None:
    """The program of one rank. What ends it goes on up; else its exit functions are run, and its
    memory, which takes a while to take apart, is left."""
    import torch.distributed as dist

    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if world.hosts == 2:
        separate(int(rank == world.ranks - 1))
    fate = Fate(world.link, world.after) if world.link else None
    store = meet(folder, rank, fate)
    if fate is not None:
        through_links(fate)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world.ranks,
        timeout=timedelta(seconds=T),
    )
    found, start = Outcome(), time.monotonic()
    try:
        if fate is not None:
            value = linked.run(world.program, rank, world.ranks, fate, folder)
        else:
            setting = Setting(rank, world.ranks)
            start = time.monotonic()
            value = PROGRAMS[world.program](setting)
        found = Outcome(value=str(value))
    except (RuntimeError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and "at_work" in world.program:
            end_by_interrupt(error)
        found = Outcome(type(error).__name__, str(error), seconds=time.monotonic() - start)
    if found.raised or fate is not None:
        found = Outcome(**asdict(found) | {"again": said_again(world.ranks)})
    with open(writer, "w") as pipe:
        json.dump(asdict(found), pipe)
    atexit._run_exitfuncs()
    os._exit(0)


def end_by_interrupt(error: KeyboardInterrupt) -> None:
    """As an interpreter does it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def said_again(ranks: int) -> str:
    import torch

    import mirrored

    try:
        mirrored.all_reduce(torch.ones(4, 2), tuple(range(ranks)))
        return ""
    except RuntimeError as error:
        return str(error)


def meet(folder: str, rank: int, fate: Fate | None) -> Any:
    """A store that rank 0 holds, which the others reach by a link if it has a fate."""
    import torch.distributed as dist

    limit, path = timedelta(seconds=20), Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
        port = store.port if fate is None else Link(("127.0.0.1", store.port), fate).address[1]
        Path(folder, "part").write_text(str(port))
        Path(folder, "part").rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, timeout=limit)


def separate(host: int) -> None:
    """Let this process take itself for one of another host, with an address of its own."""
    from mirrored.transports import _C
    from mirrored.transports.faults import watch
    from mirrored.transports.shared_memory import segments

    class Elsewhere:
        Group, remove_abandoned = _C.Group, _C.remove_abandoned

        @staticmethod
        def host_identity() -> str:
            return f"host {host}"

    segments._C = Elsewhere
    watch.own_host = lambda store_host: f"127.0.0.{host + 1}"


def warm_up() -> None:
    """Import what the programs need, and plan their ops, on ranks that are threads."""
    import torch

    import consistent
    from mirrored.transports.in_process import run_ranks

    torch.set_num_threads(1)

    def use(setting: Setting) -> None:
        setting.loss().backward()
        addend = consistent.ones(6, 4, placement=setting.x.placement, sbp=consistent.P)
        torch.softmax(setting.x, 0), setting.x + addend

    for n in (2, 3):
        run_ranks(lambda rank, n=n: use(Setting(rank, n)), n)


def main() -> None:
    worlds = [World(**each) for each in json.loads(sys.argv[1])]
    with contextlib.redirect_stdout(sys.stderr):
        warm_up()
    gc.freeze()  # a forked process then shares more of this one's memory
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # it would take apart what torch's libraries hold here
    waiting = list(enumerate(worlds))
    running: list[Running] = []
    found: dict[int, Any] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(Running(*waiting.pop(0)))
            running[-1].start()
        time.sleep(0.02)
        for each in [each for each in running if each.look()]:
            running.remove(each)
            found[each.index] = each.outcomes()
    json.dump([found[k] for k in range(len(worlds))], sys.stdout)


if __name__ == "__main__":
    main()
