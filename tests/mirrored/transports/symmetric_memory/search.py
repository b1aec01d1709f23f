"""Searches every order in which the GPUs of a few ranks may run a few moves over symmetric memory.

```
kernel    runs at any time after those before it on its stream, and those that it waits for
slot      counts its writes; a GPU has seen some of them for sure, and may read any later one
barrier   for each peer at its own time: put 1 into the peer's pad, take the peer's from its own
          put releases: the 1 carries what its GPU has seen; take acquires: this GPU has seen it
meeting   the processes go on together, if all of them call the same
```

A read is wrong if it may find another write than the one that the call means. A run is wrong if a
GPU waits and nobody will come.

What it leaves out: what kernels compute, and how they cut a slot (it is one location); GPUs that
run the barriers of two streams at once with too little room for both; the pads' own timeouts; more
than three ranks. The meeting is taken for what it promises; that it keeps it in the host's memory
is for the tests of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One of the two slots of a rank."""

    rank: int
    half: int


class Meeting(NamedTuple):
    """Where the processes meet, and what they call there."""

    call: str


class Kernel(NamedTuple):
    """One kernel of a rank's program.

    Args:
        after: kernels of this rank, by number, that it waits for besides those of its stream.
    """

    stream: str
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()
    barrier: bool = False
    after: tuple[int, ...] = ()


Program = list[Kernel | Meeting]
View = tuple[int, ...]  # of each slot, the number of writes that have been seen for sure


class State(NamedTuple):
    """Where all ranks are.

    Args:
        ended: of each rank's kernels, what its GPU had seen at their end; None before that.
        puts, takes: of each rank's current barrier, the peers that it has gone through.
        pads: by receiver and sender, what the 1 in it carries; None for 0.
        written: the writes of each slot that were done.
    """

    ended: tuple[tuple[View | None, ...], ...]
    barriers: tuple[tuple[tuple[int, frozenset[int], frozenset[int], View], ...], ...]
    pads: tuple[View | None, ...]
    written: View


class Fault(Exception):
    """What may go wrong."""


class Search:
    """All runs of the ranks' programs.

    Args:
        releases, acquires: whether the barrier's put and take do.
        meets: whether processes wait for each other.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        releases: bool = True,
        acquires: bool = True,
        meets: bool = True,
    ) -> None:
        self.n, self._releases, self._acquires = len(programs), releases, acquires
        reached = _meetings_kept(programs) if meets else max(map(len, programs))
        self._kernels: list[list[Kernel]] = []
        self._calls: list[list[str]] = []
        for program in programs:
            self._take(program, reached)
        self._before = [_before(kernels) for kernels in self._kernels]
        self._wanted = [self._expected(rank) for rank in range(self.n)]

    def _take(self, program: Program, meetings: int) -> None:
        """Those kernels of a program that are launched: the process is past their meeting."""
        kernels, calls, met = [], [], 0
        for each in program:
            if isinstance(each, Meeting):
                met += 1
                call = each.call
                continue
            if met > meetings:
                break
            kernels.append(each)
            calls.append(f"{met} {call}")
        self._kernels.append(kernels)
        self._calls.append(calls)

    def _expected(self, rank: int) -> list[dict[int, int]]:
        """Of each kernel of ``rank``, slot -> number of the write that its reads mean: the last
        that the owner's program does before as many barriers."""
        wanted, barriers = [], 0
        for kernel in self._kernels[rank]:
            barriers += kernel.barrier
            wanted.append({_at(slot): self._writes(slot, barriers) for slot in kernel.reads})
        return wanted

    def _writes(self, slot: Slot, barriers: int) -> int:
        done = 0
        for kernel in self._kernels[slot.rank]:
            barriers -= kernel.barrier
            if barriers < 0:
                break
            done += slot in kernel.writes
        return done

    def run(self) -> int:
        """Look at all runs. Gives the number of states; raises Fault."""
        first = State(
            tuple((None,) * len(kernels) for kernels in self._kernels),
            ((),) * self.n,
            (None,) * (self.n * self.n),
            (0,) * (2 * self.n),
        )
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            moved = False
            for after in self._steps(state):
                moved = True
                if after not in seen:
                    seen.add(after)
                    left.append(after)
            if not moved and any(None in ended for ended in state.ended):
                waiting = [r for r in range(self.n) if None in state.ended[r]]
                raise Fault(f"GPUs of ranks {waiting} wait for ever")
        return len(seen)

    def _steps(self, state: State) -> Iterator[State]:
        for rank in range(self.n):
            for k, kernel in enumerate(self._kernels[rank]):
                ended = state.ended[rank]
                if ended[k] is not None or any(ended[j] is None for j in self._before[rank][k]):
                    continue
                views = [ended[j] or () for j in self._before[rank][k]]
                view = _joined([(0,) * (2 * self.n), *views])
                if kernel.barrier:
                    yield from self._in_barrier(state, rank, k, view)
                else:
                    yield self._run(state, rank, k, view)

    def _run(self, state: State, rank: int, k: int, view: View) -> State:
        kernel, written = self._kernels[rank][k], list(state.written)
        for slot, wanted in self._wanted[rank][k].items():
            what = f"rank {rank} in {self._calls[rank][k]!r} reads slot {Slot(*divmod(slot, 2))}"
            if view[slot] < wanted:
                raise Fault(f"{what} and may find what was there before")
            if written[slot] > wanted:
                raise Fault(f"{what} and may find what was written for a later call")
            if not self._fits(rank, k, slot, wanted):
                raise Fault(f"{what} and finds the tensor of another call")
        now = list(view)
        for slot in map(_at, kernel.writes):
            written[slot] += 1
            now[slot] = written[slot]
        return self._ended(state._replace(written=tuple(written)), rank, k, tuple(now))

    def _fits(self, rank: int, k: int, slot: int, wanted: int) -> bool:
        """Whether that write is of the call that this kernel is of."""
        owner = slot // 2
        writers = [
            j for j, each in enumerate(self._kernels[owner]) if slot in map(_at, each.writes)
        ]
        return self._calls[owner][writers[wanted - 1]] == self._calls[rank][k]

    def _in_barrier(self, state: State, rank: int, k: int, start: View) -> Iterator[State]:
        """One peer goes a step further. Each peer has a thread of its own."""
        own = {at: (puts, takes, view) for at, puts, takes, view in state.barriers[rank]}
        puts, takes, view = own.get(k, (frozenset(), frozenset(), start))
        for peer in range(self.n):
            if peer == rank or peer in takes:
                continue
            if peer not in puts:
                pad = peer * self.n + rank
                if state.pads[pad] is None:
                    carried = start if self._releases else (0,) * len(start)
                    yield self._barrier(
                        state, rank, k, (puts | {peer}, takes, view), (pad, carried)
                    )
                continue
            pad = rank * self.n + peer
            carried = state.pads[pad]
            if carried is not None:
                seen = _joined([view, carried]) if self._acquires else view
                yield self._barrier(state, rank, k, (puts, takes | {peer}, seen), (pad, None))

    def _barrier(
        self,
        state: State,
        rank: int,
        k: int,
        now: tuple[frozenset[int], frozenset[int], View],
        pad: tuple[int, View | None],
    ) -> State:
        pads = list(state.pads)
        pads[pad[0]] = pad[1]
        others = tuple(each for each in state.barriers[rank] if each[0] != k)
        is_last = len(now[1]) == self.n - 1
        mine = others if is_last else tuple(sorted((*others, (k, *now)), key=lambda b: b[0]))
        barriers = (*state.barriers[:rank], mine, *state.barriers[rank + 1 :])
        after = state._replace(barriers=barriers, pads=tuple(pads))
        return self._ended(after, rank, k, now[2]) if is_last else after

    def _ended(self, state: State, rank: int, k: int, view: View) -> State:
        own = (*state.ended[rank][:k], view, *state.ended[rank][k + 1 :])
        return state._replace(ended=(*state.ended[:rank], own, *state.ended[rank + 1 :]))


def _at(slot: Slot) -> int:
    return 2 * slot.rank + slot.half


def _joined(views: Sequence[View]) -> View:
    return tuple(map(max, zip(*filter(None, views), strict=True)))


def _meetings_kept(programs: Sequence[Program]) -> int:
    """How many meetings all processes come through: those before the first in which one is missing
    or calls something else."""
    calls = [[each.call for each in program if isinstance(each, Meeting)] for program in programs]
    kept = 0
    for each in zip(*calls, strict=False):
        if len(set(each)) > 1:
            break
        kept += 1
    return kept


def _before(kernels: Sequence[Kernel]) -> list[list[int]]:
    """The kernels that each waits for: the last on its stream, and those that it names."""
    last: dict[str, int] = {}
    found = []
    for k, kernel in enumerate(kernels):
        found.append([j for j in (last.get(kernel.stream), *kernel.after) if j is not None])
        last[kernel.stream] = k
    return found
