"""The peer-memory moves stand alone, and are clean under the sanitizers."""

import pytest

from tests.csrc.compiling import ROOT, run
from tests.csrc.emulating import EXACT, MEMORY, NONE, THREADS, build, needs_emulator
from tests.ranks import ALL

PEER = ROOT / "csrc" / "peer"

TESTS = ROOT / "csrc" / "tests"


@needs_emulator
@pytest.mark.parametrize(
    "sanitizer, ranks", [(THREADS, "threads"), *([(EXACT, "processes")] if ALL else [])]
)
def test_every_move_is_right_and_clean(sanitizer, ranks):
    program = build(tuple(sorted(PEER.glob("*.cpp"))), sanitizer, cases=(TESTS / "peer_test.cpp",))
    assert run(program, ranks) == "every move is right\n"


@needs_emulator
def test_moves_between_devices_are_right_and_clean_where_the_cpu_does_them():
    sources = PEER / "device_moves_cpu.cpp", PEER / "reduce.cpp"  # built for test_emulated.py too
    cases = (TESTS / "device_moves_test.cpp",)
    assert run(build(sources, MEMORY, cases=cases)) == "every move is right\n"


@needs_emulator
def test_nobody_waits_for_a_rank_that_was_killed_at_any_instruction_of_its_arrival():
    sources = PEER / "meeting.cpp", PEER / "segment.cpp"
    program = build(sources, NONE, cases=(TESTS / "killed_test.cpp",))
    assert run(program) == "nobody waits for a process that was killed\n"


def test_neither_torch_nor_python_is_needed():
    for source in PEER.iterdir():
        text = source.read_text()
        assert not any(f"#include <{top}" in text for top in ("torch", "ATen", "c10", "Python"))
