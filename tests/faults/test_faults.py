"""When a rank waits in vain, every rank raises in time, and says where each rank is."""

from __future__ import annotations

import functools
import re

import pytest

from tests.faults.places import places
from tests.faults.programs import FINE, INSTEAD, PROGRAMS, RANKS
from tests.faults.worlds import Outcome, World, run
from tests.ranks import ALL

# Programs in which one rank is at another line are alike but for that line, and those in which a
# process is gone but for its status: they take turns.
ON_ONE_HOST = {
    "item_on_one_rank", "one_more_step_on_one_rank", "an_exception_that_is_caught", "a_busy_loop",
    "a_crash",
}  # fmt: skip
ON_TWO_HOSTS = {
    "another_op", "backward_on_one_rank", "an_early_return", "a_lock_that_nobody_frees",
    "an_exit_without_farewell",
}  # fmt: skip


def is_run(name: str, n: int, hosts: int) -> bool:
    """Two ranks of one host prove nothing that three do not."""
    if (n, hosts) == (2, 1) and (3, 1) in RANKS[name]:
        return False
    return name not in (ON_TWO_HOSTS if hosts == 1 else ON_ONE_HOST)


WORLDS = [
    World(name, n, hosts)
    for name in PROGRAMS
    for n, hosts in RANKS[name]
    if ALL or is_run(name, n, hosts)
]
FAULTS = [world for world in WORLDS if world.program not in FINE]

# What a rank does that does not raise: it ends, or has left.
ENDS = {
    "has ended": 0,
    "ValueError: this batch is empty, at ": 1,
    "KeyboardInterrupt": -2,
    "has left the process group": 0,
}
BY_SIGNAL = {"a_crash": -6, "an_exit_without_farewell": 3}


@functools.cache
def outcomes() -> dict[World, list[Outcome]]:
    return dict(zip(WORLDS, run(WORLDS), strict=True))


def name_of(world: World) -> str:
    return f"{world.program}-{world.ranks}-{'one host' if world.hosts == 1 else 'two hosts'}"


@pytest.mark.parametrize("world", FAULTS, ids=name_of)
def test_every_rank_raises_in_time_and_names_the_place_of_each(world: World) -> None:
    found, instead, lines = (
        outcomes()[world],
        INSTEAD[world.program],
        places(world.program, world.ranks),
    )
    alive = [rank for rank in range(world.ranks) if found[rank].raised]
    gone = [rank for rank in instead if instead[rank] not in ("stopped", "does not answer")]
    assert sorted([*alive, *gone]) == list(range(world.ranks)), found
    for rank in alive:
        assert found[rank].status == 0  # one that is late is killed
        words = found[rank].words or found[rank].again
        for other in range(world.ranks):
            said = re.search(rf"^    rank {other}: (.*)$", words, re.MULTILINE)
            wanted = [instead[other]] if other in instead else lines.get(other, [])
            assert said and all(part in said.group(1) for part in wanted), words
    assert len({found[rank].words or found[rank].again for rank in alive}) == 1
    for rank in gone:
        wanted = BY_SIGNAL.get(world.program, ENDS.get(instead[rank], -9))
        assert found[rank].status == wanted


@pytest.mark.parametrize("world", FAULTS, ids=name_of)
def test_ranks_stay_broken_or_whole_together(world: World) -> None:
    again = {each.again for each in outcomes()[world] if each.raised}
    assert len(again) == 1 and ("stays broken" in again.pop() or compared(world))


def compared(world: World) -> bool:
    """Whether calls that do not fit are found before anything is sent: then the next one works."""
    return world.hosts == 1 and world.program.startswith("another_")


@pytest.mark.parametrize("world", [w for w in WORLDS if w.program in FINE], ids=name_of)
def test_what_is_no_fault_goes_on(world: World) -> None:
    assert [each.value for each in outcomes()[world]] == ["144.0"] * world.ranks
    assert [each.status for each in outcomes()[world]] == [0] * world.ranks
