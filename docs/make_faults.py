"""Writes docs/faults.md: what every rank raises if one hangs, ends or calls something else.

`python docs/make_faults.py` runs the programs of tests/faults, as tests/faults/test_faults.py does.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FAULTS_T", "5")  # enough also on a machine that is busy

from tests.faults import programs  # noqa: E402
from tests.faults.programs import FINE, PROGRAMS, RANKS  # noqa: E402
from tests.faults.setting import T  # noqa: E402
from tests.faults.worlds import Outcome, World, run  # noqa: E402

FAULTS = [name for name in PROGRAMS if name not in FINE]

HEAD = """# When a rank waits in vain

Written by `python docs/make_faults.py`, which runs the programs of `tests/faults/programs.py` with
a time-out of {limit:.0f} s. In each program one rank hangs, ends or makes another call than the
others. A rank that waits for it gives up after the time-out, or at once if it sees that a rank has
ended. Then *every* rank raises the same message, which says where each of them is: at once if it is
waiting, otherwise when it communicates next. Nothing is recorded while all is well: a rank's line,
op and boxing (redistribution) are read from its stack when another rank requests them
(`mirrored/transports/faults/`).

On one host the ranks share memory, and calls that do not match are found before anything is sent:
all ranks raise at once, and the next call works. On two hosts (two ranks on one, one on the other)
they send messages. Each message has a number computed from its call: the kind of communication, the
ranks, the dtype, the shapes, the dims and the sizes of all shards. A message with another number is
never accepted, so both sides wait until the time-out. A group in which ranks gave up stays unusable
on all its ranks. The tables leave out the last lines of each message, which say what to do.

`print(x)` on one rank is not a fault: it communicates nothing. If a forked child process of a rank
tries to communicate, or waits for communication that its parent has started, it raises at once, and
its parent goes on (`tests/mirrored/transports/test_children.py`).

### Threads and signals

**Only one thread of a rank communicates**, because ranks match calls by their order, and the order
of two threads' calls differs between ranks. It is the thread that used the process group first, in
most programs the main thread. A call in another thread raises, in that thread only, and the error
says where both threads are; the first thread's values stay correct. After that thread has ended,
the next one that communicates takes over. If one thread waits while another one communicates (a
server that answers in a thread pool, a `ThreadPoolExecutor` that evaluates,
`Thread(target=model.generate)`), the latter has to declare it:
`with consistent.in_this_thread():`. The library's own threads, which gather ahead and send in the
background, keep one order. Any thread may do what involves no other rank.

**A signal handler cannot communicate.** It runs between any two instructions of one rank, while
the other ranks are elsewhere. In the middle of a call, communication in a handler is refused at
once, and so it is in `__del__` and in callbacks of weak references and of the garbage collector. If
the handler catches the error, the interrupted call continues and returns the correct value;
otherwise the error ends the call, as any exception of a handler does, and every rank stops.
`checkpoint.save` in a handler is always refused. To save on a signal, set a flag, and act on it
between two steps: `due = consistent.checkpoint.on_signal(signal.SIGUSR1)`, and save if `due()` is
true, which it is on all ranks at the same step; `batches.stop_on(signal.SIGTERM)` of a
`data.loader` ends a loop in this way.

### Connections to a rank's port

Each rank listens at one TCP port, at which other ranks request where it is. It binds only to the
address by which other hosts reach this machine: that of the interface in `GLOO_SOCKET_IFNAME`, or
else of the interface that leads to the store (the key-value store of the process group). It binds
to all addresses only if that address is not this machine's own, for example behind a router. A
request begins with a random secret that the rank has put into the store, so whoever can read the
store can send requests. Any other connection is closed at its first wrong byte. A connection has
one second for its whole request and answer. At most 64 are open, and a new one replaces the oldest.
A request is at most 1 MB long. It can only read the line where the rank is, leave a note why
another rank ended, stop the rank, or open the connection for its messages.

### A link that is cut, or slow

Between hosts, the time-out of the process group limits the time of one call. If a link drops what
is sent, both ranks raise after the time-out and up to about two seconds more, in which they request
each other's place. If either side resets or ends a connection, they raise at once. A rank that has
sent all of its data may have finished the call in which the other one raises; it raises in its next
call. A lost connection is not established again. Requests to the store, by which ranks find each
other, have the same time-out, although TCP itself would wait for a quarter of an hour. A slow link
changes no values: with latency, low throughput, single bytes or pauses, calls only take longer, as
long as each ends in time (`tests/faults/test_links.py`).

### Another process group in the same processes

After `destroy_process_group` and `init_process_group` the ranks find each other again, also over
the same store. Global tensors made before keep their placements, which consist of rank numbers:
they are valid if the new world has these ranks, and otherwise raise when they communicate.

### Errors on one rank only

**If the values on one rank make an op raise, every rank raises**, at the same call. Examples are a
singular matrix, an index out of range, a probability above 1, and an integer divided by zero in one
rank's shard. The ranks of the placement notify each other after such an op, and all raise the same
class with the same text, whose last line names the rank. So a program may catch the error as it
would in one process: skip the batch, or add jitter and try again. This holds for the ops of
`consistent/rules/raising.py` if the operand that decides is split; if it is the same on all ranks,
each raises by itself. It costs one synchronization after such an op (4 µs in shared memory,
otherwise a byte to each other rank), which reports do not count. A step of `consistent.compile`
raises the same error on all ranks at its call. What it has written until then is the same on all
ranks, but may differ from what the step would have written without `compile`.

Ranks outside the placement, which run the op on meta tensors, are notified too and raise the same
error. So if the placement has only some ranks of the world, such an op is still a call of all
ranks, as is an op whose result has a shape that depends on data. A program that skips it on ranks
outside (`if rank in ...`) makes the others wait. Exceptions are stages of a pipeline and a user's
`autograd.Function`: their ops are not run on ranks outside, which are notified at the end of that
call. On a GPU an index out of range is the device's own assertion, which ends the process.

**Backward.** If values make the backward of an op raise, every rank of the placement raises too, at
its `backward()` or `torch.autograd.grad`, and the program may continue. This can happen with:

* complex eigenvectors and singular vectors, if the gradient depends on their phase, as NaN and
  infinity do;
* with `create_graph=True`, the determinant and `solve_ex` of a singular matrix;
* the second derivative of a product with two zeros (`scatter_reduce`, `index_reduce`).

Ranks outside the placement have other autograd nodes and are not notified. When such a rank next
communicates with one that has raised, both raise (between hosts, the one that waits for the other),
and so does every later call between them. In a compiled step torch does not check the phase, so
such a gradient is returned.

In anomaly mode, a NaN in one rank's gradient raises torch's error on all ranks at the end of
backward, after gradients have been added to `.grad`. Any other error in backward, for example in a
hook, is raised on that rank only. If it ends the program, all ranks end with this error. If the
program catches it, the ranks are at different steps from then on. So no message of this rank
matches one of a rank that has not raised, even if the two look the same. Both raise when they
communicate next (between hosts, if only the rank that has raised waits for the other, after the
time-out), and so does every later call. No value of another batch is used. Restart the job from its
last checkpoint.

**Out of memory** is often an error of one rank only, and programs catch it (they skip the batch, or
use a smaller one). If ranks share memory, and one cannot allocate its part of an exchange, it
reports this in the exchange: nothing is moved, every rank raises `rank 1 got no memory for ...`,
and the program may continue, because all ranks are at the same step. Anywhere else (in an op on its
shard, in a copy between two exchanges, in backward, in a compiled step, between hosts) the rank
raises by itself, with torch's error. This has the consequences of an error in backward: if the
program continues, no message of this rank matches one of a rank without the error, and both raise
when they communicate next. If all ranks run out of memory at the same place, for example because
all shards are too large, they are still at the same step and can continue. In a pipeline every rank
raises at once. If a shared segment cannot grow, for example because `/dev/shm` is full, messages go
by sockets, with a warning.

**Ctrl-C** interrupts a rank anywhere. If it is not caught, it ends all ranks. If a program catches
`KeyboardInterrupt` and continues, as a prompt does, no value of another step is used. Nobody knows
at which step the other ranks were, so from then on the messages of this rank match those of no
other rank, interrupted or not. Both raise when they communicate next, or between hosts after the
time-out at the latest, and so does every later call. Restart the job from its last checkpoint,
since some ranks may have taken a step that others have not. Another process group, with its own
store or port, works too. While a prompt waits for a line no code runs, and Ctrl-C has no such
effect. The library detects Ctrl-C by its own handler, which it installs at the first message, and
only in place of Python's default handler. For errors of a program's own handler, see the next
paragraph. To end a loop by Ctrl-C at the same step on all ranks:
`due = consistent.checkpoint.on_signal(signal.SIGINT)`.

**Code between ops**, for example data loading, may raise on one rank, and the other ranks do not
learn of it. If the error is not caught, it ends all ranks. If a program catches it, let the ranks
decide together:

```python
bad = consistent.from_local(torch.tensor([bad_here]), placement, S(0))
if bad.any().item():  # the same on every rank
    continue
```

The second column of the tables has for each rank the error that it raised, and after how many
seconds, or its exit status (`ends (-9)`), or `goes on`. "At steps 5, 4" in a message are counts of
each rank's synchronizations in shared memory.

"""


def heading(name: str) -> str:
    line = inspect.getsourcelines(PROGRAMS[name])[1]
    return f"## {name.replace('_', ' ')} (programs.py:{line})"


def ranks_of(world: World) -> str:
    return f"| {world.ranks}, {'one host' if world.hosts == 1 else 'two hosts'} |"


def shown(world: World, found: list[Outcome]) -> str:
    """A row: the ranks, what each of them raised and when, and the message."""
    words = next(each.words or each.again for each in found if each.raised)
    lines = [line for line in words.splitlines() if not re.match(r"  \S", line)]
    text = "<br>".join(short(line) for line in lines)
    when = "<br>".join(f"rank {rank} {said(each)}" for rank, each in enumerate(found))
    return f"{ranks_of(world)} {when} | {text} |"


def said(each: Outcome) -> str:
    if each.raised:
        return f"{each.raised} after {each.seconds:.1f} s"
    return f"ends ({each.status})" if not each.value else "goes on"


def short(line: str) -> str:
    line = line.replace(f"{Path(programs.__file__)}", "programs.py").strip()
    line = re.sub(r"process \d+", "process N", line)
    line = re.sub(r"\[127[\d.]+\]:\d+", "[address]", line)
    return line.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def main() -> None:
    worlds = [World(name, n, hosts) for name in FAULTS for n, hosts in RANKS[name]]
    outcomes = dict(zip(worlds, run(worlds), strict=True))
    parts = [HEAD.format(limit=T)]
    for name in FAULTS:
        rows = [(world, outcomes[world]) for world in worlds if world.program == name]
        parts.append(f"{heading(name)}\n\n")
        parts.append("| ranks | each rank raises, and when | message |\n| --- | --- | --- |\n")
        parts.append("\n".join(shown(*row) for row in rows) + "\n\n")
    (ROOT / "docs" / "faults.md").write_text("".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
