"""Any small program on global tensors equals the same one on plain tensors: values and gradients.

``CONSISTENT_PROGRAMS=2000`` runs that many on each number of ranks (default 27).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, note, settings

from tests.consistent.programs.drawing import programs
from tests.consistent.programs.programs import Program, run, snippet
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, SIZES, pool

COUNT = int(os.environ.get("CONSISTENT_PROGRAMS", "80" if ALL else "27"))


WORLDS: dict[str, tuple[int, tuple]] = {
    **{str(world): (world, ()) for world in SIZES},
    "3-apart": (3, (over_gloo,)),
}


@pytest.mark.parametrize(("world", "way"), WORLDS.values(), ids=WORLDS)
def test_program_on_global_tensors_equals_plain_torch(world: int, way: tuple) -> None:
    @settings(
        max_examples=COUNT, derandomize=True, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(world))
    def check(program: Program) -> None:
        note(snippet(program, world))
        wrong = pool(world).run(*way, run, program, timeout=60)
        assert not any(wrong), "\n".join(map("\n".join, wrong))

    check()
