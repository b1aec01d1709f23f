"""Writes docs/faults.md: what every rank raises when one goes astray. `python docs/make_faults.py`.

It runs the programs of tests/faults, as tests/faults/test_faults.py does.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FAULTS_T", "5")  # enough for a machine that does something else too

from tests.faults import programs  # noqa: E402
from tests.faults.programs import FINE, PROGRAMS, RANKS  # noqa: E402
from tests.faults.setting import T  # noqa: E402
from tests.faults.worlds import Outcome, World, run  # noqa: E402

FAULTS = [name for name in PROGRAMS if name not in FINE]

HEAD = """# When a rank waits in vain

Written by `python docs/make_faults.py`, which runs the programs of `tests/faults/programs.py` with
a time-out of {limit:.0f} s. One rank goes astray; who waits for it gives up when the time is up, or
at once where it sees that a rank has ended, and *every* rank raises the one message that says where
each of them is: at once where it waits, else when it communicates next. Nothing is noted while all
is well: line, op and boxing are read off a rank's stack when another one asks
(`mirrored/transports/faults/`).

On one host the ranks share memory, and calls that do not fit are found before anything is sent: all
raise at once, and the next call works. On two hosts (two ranks and one) they send messages. Each
says by a number what call it belongs to: the move, the ranks, the dtype, the shapes, the dims and
the sizes of all parts. A message that does not fit is never taken, so both sides wait. The last
lines of each message, which say what to do, are left out; a group that was given up stays broken on
all its ranks.

`print(x)` on one rank is not a fault: it communicates nothing. A forked child of a rank that tries
to communicate, or waits for what its parent has started, raises at once, and its parent goes on
(`tests/mirrored/transports/test_children.py`).

### Threads and signals

**One thread of a rank communicates**, because ranks match calls by their order, and that of two
threads differs by rank. It is the thread that used the process group first, which is the main
thread of most programs. A call in another one raises, there alone, and says where both are; the
values of the first are right. Once that thread has ended, the next one that communicates takes
over. A program in which one thread waits while another one communicates (a server that answers in
a pool of threads, a `ThreadPoolExecutor` that evaluates, `Thread(target=model.generate)`) says so
in the latter: `with consistent.in_this_thread():`. The library's own threads, which gather ahead
and send in the background, keep one order. What no other rank takes part in, any thread may do.

**A handler of a signal cannot communicate.** It runs between any two instructions of one rank,
and the others are elsewhere. In the middle of a call it is refused at once, as are `__del__`,
callbacks of weak references and of the garbage collector; if it catches the error the call goes
on and gives the right value, else the error ends the call as any exception of a handler does, and
every rank stops. `checkpoint.save` in a handler is refused wherever it runs. Set a flag, and act
on it between two steps: `due = consistent.checkpoint.on_signal(signal.SIGUSR1)`, and where
`due()` is true, on all ranks at the same step, save; `batches.stop_on(signal.SIGTERM)` of a
`data.loader` ends a loop so.

### Who is answered

Each rank listens at one TCP port for the others, who ask where it is. It binds to the address by
which others reach this machine and to no other one: that of the interface which
`GLOO_SOCKET_IFNAME` names, else the one by which this machine reaches the store; to all of the
machine only where that address is not one of its own, as behind a router. A request begins with a
random secret that a rank enters in the store, so who reads the store may ask. Anybody else is cut
off at the first byte that is another one. A connection has one second for all of its request and
answer, 64 may be open, and one that is new takes the place of the oldest; a request is at most 1
MB long. What a rank answers is the line where it is, and it stops when it is told to; nothing
else can be asked for.

### A link that is cut, or slow

Between hosts the time-out of the process group is the longest that one call may take. Where a link
drops what is sent, both ranks raise when that time is up, and within about two seconds more, in
which they ask each other where they are; where a connection is reset or ended from either side,
they raise at once. A rank that has sent all of its part may be done with a call that the other one
raises in: it raises in its next one. A connection that was lost is not made again. The store by
which ranks find each other is asked for no longer than that either, though TCP itself would wait
for a quarter of an hour. A slow link only slows: latency, throughput, single bytes and pauses
change no value, as long as each call is done in time (`tests/faults/test_links.py`).

### Another process group in the same processes

After `destroy_process_group` and `init_process_group` the ranks find each other again, over the
same store too. Global tensors made before belong to placements of ranks: they are valid again
where the new world has these ranks, and else raise when they communicate.

### What one rank alone raises

**What the values of one rank make an op raise, every rank raises**, at the same call: a singular
matrix, an index out of range, a probability above 1, an integer divided by zero in the shard of
one rank. The ranks of the placement tell each other after such an op, and all raise the same
class with the same text, whose last line says on which rank it was. So a program may catch it as
it would in one process: leave the batch out, or add jitter and try again. This holds for the ops
of `consistent/rules/raising.py`, where what decides is split; where it is the same on all ranks,
all raise by themselves. It costs a meeting after such an op (4 µs in shared memory, else a byte
to each other rank); reports do not count it. A step of `consistent.compile` raises the same on
all ranks at its call, and what it had written by then is the same on all of them, but need not be
what the step as it is written would have written by then.

Ranks outside the placement, which follow, are told, too, and raise the same. So such an op on a
placement of a part of the world is a call of all ranks, as are those whose results' shapes depend
on data, and a program that leaves it out on ranks outside (`if rank in ...`) makes the others wait.
In a stage of a pipeline and inside a user's Function ranks outside do not follow: they hear of it
at the end of that call. On a GPU an index out of range is the device's own assertion, which ends
the process.

**Backward.** What values make the backward of an op raise, every rank of the placement raises too,
at its `backward()` or `torch.autograd.grad`, and the program may go on: eigenvectors and singular
vectors, if they are complex, whose gradient depends on their phase (NaN and infinity do); with
`create_graph=True` the determinant and `solve_ex` of a singular matrix; the second derivative of a
product that has two zeros (`scatter_reduce`, `index_reduce`). Ranks outside the placement have
other nodes and are not told: when they communicate next with a rank that has raised, both raise
(between hosts the one that waits for the other does),
and so does every later call between them. Torch looks at no phase in a compiled step, so there the
gradient is what comes out.

In anomaly mode a NaN in one rank's gradient raises torch's message on all ranks as backward ends,
which it does: gradients have been added to `.grad`. Anything else that one rank raises in backward,
as a hook may, it raises alone. If the program ends by that, all ranks end,
with its error. If the program catches it, ranks are at different steps from then on, so no
message of that rank fits one of a rank that has not raised, however alike the two look: both raise
when they communicate next (between hosts, where only the rank that has raised waits for the other,
when the time is up), and so does every later call. No number of another batch is taken. Start the
job again from its last checkpoint.

**Memory that runs out** is often met by one rank alone, and programs catch it (leave the batch out,
take a smaller one). Where ranks share memory, a rank that gets none for its part of an exchange
says so in that exchange: nothing is moved, every rank raises `rank 1 got no memory for ...`, and
the program may go on, as all ranks are at the same step. Anywhere else, in an op on its shard, in a
copy between two exchanges, in backward, in a compiled step, between hosts, it raises alone, with
torch's error. It is counted as an error in backward is: if the program goes on, no message of that
rank fits one of a rank that has not met it, and both raise when they communicate next. If all
ranks meet it at the same place, as they do where all shards are too large, they are still in step
and go on. In a pipeline every rank raises at once. A shared segment that cannot grow, as with
`/dev/shm` full, is done without: there is a warning, and messages go by sockets.

**Ctrl-C** interrupts a rank anywhere. Not caught, it ends all ranks. A program that catches
`KeyboardInterrupt` and goes on, as a prompt does, gets no number of another step: nobody knows
where the others were then, so from then on the messages of that rank fit those of no other one,
be it interrupted, too, and both raise when they communicate next, or between hosts at the latest
when the time is up. So does every later call. Start the job again from its last checkpoint, since
some ranks may have taken a step that others have not; another process group, over a store or a port
of its own, is whole again, too. At a prompt that waits for a line nothing is under way, and Ctrl-C
changes nothing. The library notices it by a handler of its own, which it sets with the first
message and only in place of Python's; a program whose own handler raises is in the case of the next
paragraph.
To end a loop by Ctrl-C at the same step everywhere:
`due = consistent.checkpoint.on_signal(signal.SIGINT)`.

**Code between ops** (data loading, say) may raise on one rank, and nobody else knows. Not caught,
it ends all ranks. If it may be caught, let the ranks decide together:

```python
bad = consistent.from_local(torch.tensor([bad_here]), placement, S(0))
if bad.any().item():  # the same on every rank
    continue
```

"""


def heading(name: str) -> str:
    line = inspect.getsourcelines(PROGRAMS[name])[1]
    return f"## {name.replace('_', ' ')} (programs.py:{line})"


def ranks_of(world: World) -> str:
    return f"| {world.ranks}, {'one host' if world.hosts == 1 else 'two hosts'} |"


def shown(world: World, found: list[Outcome]) -> str:
    """A row: on which ranks, when each raised, and the words."""
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
        parts.append("| ranks | each raises | message |\n| --- | --- | --- |\n")
        parts.append("\n".join(shown(*row) for row in rows) + "\n\n")
    (ROOT / "docs" / "faults.md").write_text("".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
