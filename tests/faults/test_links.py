"""A link between two hosts that is cut ends both ranks with an error in time, whatever they do; a
slow one only slows."""

from __future__ import annotations

import functools

import pytest

from tests.faults import linked
from tests.faults.link import CUTS, SLOW
from tests.faults.setting import T
from tests.faults.worlds import Outcome, World, run
from tests.ranks import ALL

SHORT = ("short sum", "sum with notes", linked.SAVE)  # which send few bytes
PROGRAMS = (*linked.MOVES, *linked.PLANS, linked.SAVE)
FEW = {
    "sum": "drop", "cuts begun": "reset", "objects": "one way", "data": "half", "zero3": "drop",
    "tensor": "one way", linked.SAVE: "drop",
}  # fmt: skip


def cut(name: str, kind: str, ranks: int = 2) -> World:
    """The link is cut in the middle of a message."""
    return World(name, ranks, 2, kind, 20 if name in SHORT else 1000)


CUT = [cut(*each) for each in FEW.items()]
if ALL:
    CUT = [cut(name, kind, n) for name in PROGRAMS for kind in CUTS for n in (2, 3)]
CUT.append(World(linked.BEFORE, 2, 2, "drop"))
SLOWED = [World(linked.ALL, 2, 2, kind, 1000) for kind in ("nothing", *SLOW)]


@functools.cache
def outcomes() -> dict[World, list[Outcome]]:
    return dict(zip([*CUT, *SLOWED], run([*CUT, *SLOWED]), strict=True))


def name_of(world: World) -> str:
    return f"{world.program}-{world.link}-{world.ranks}"


@pytest.mark.parametrize("world", CUT, ids=name_of)
def test_a_cut_link_ends_both_ranks_in_time(world: World) -> None:
    found = outcomes()[world]
    # A rank that has sent all of its part may be done: it learns of the cut when it goes on.
    assert any(each.raised for each in found), found
    for each in found:
        assert each.status == 0, found  # one that is late is killed
        words = each.words if each.raised else each.again
        assert "so every rank stops" in words, found
        assert each.seconds < 2 * T + 4, found


@pytest.mark.parametrize("world", SLOWED[1:], ids=name_of)
def test_a_slow_link_only_slows(world: World) -> None:
    wanted = [each.value for each in outcomes()[SLOWED[0]]]
    assert all(wanted) and [each.value for each in outcomes()[world]] == wanted
